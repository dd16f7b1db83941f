"""The processor of this machine."""


def is_made_by(vendor: str) -> bool:
    """Whether the processor is of a vendor: AuthenticAMD or GenuineIntel."""
    try:
        with open("/proc/cpuinfo") as lines:
            return any(line.split() == ["vendor_id", ":", vendor] for line in lines)
    except OSError:  # not Linux
        return False

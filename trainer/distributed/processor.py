"""The processor of this machine, and the kernels of MKL that it needs for equal bits. No torch is imported."""


def is_made_by(vendor: str) -> bool:
    """Whether the processor is of a vendor: AuthenticAMD or GenuineIntel."""
    try:
        with open("/proc/cpuinfo") as lines:
            return any(line.split() == ["vendor_id", ":", vendor] for line in lines)
    except OSError:  # not Linux
        return False


def fixed_kernels() -> str:
    """The value of MKL_CBWR for --exact. Strict mode is for Intel's processors only."""
    return "AUTO,STRICT" if is_made_by("GenuineIntel") else "AUTO"

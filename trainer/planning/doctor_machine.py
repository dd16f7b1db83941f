"""Findings of `doctor` about the machine: GPUs, limits, ports, network interfaces, and the variables of a launcher."""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.metrics import counted

FAIL = "FAIL"
MIN_OPEN_FILES = 1024
MIN_SHARED_MEMORY = 1 << 30  # bytes; NCCL's own advice for containers. Docker gives 64 MiB
DEFAULT_PORT = 29500  # torchrun's
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
NVIDIA_DRIVER, INFINIBAND = Path("/proc/driver/nvidia/version"), Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `state` is ok, note (it works, but less well) or FAIL. `cure` says what to do."""

    name: str
    state: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.state:<5} {self.name:<15} {self.text}" + (f" -> {self.cure}" if self.cure else "")


def machine_findings() -> Iterator[Finding]:
    yield cuda()
    yield visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), _num_seen(), _num_installed())
    yield nccl()
    yield launcher_variables(dict(os.environ))
    yield interfaces()
    yield host_name()
    yield port()
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield shared_memory(shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0)


def cuda() -> Finding:
    if torch.cuda.is_available():
        return _cards()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not NVIDIA_DRIVER.exists() or hidden:
        why = "CUDA_VISIBLE_DEVICES hides the GPUs" if hidden else "no NVIDIA driver"
        return Finding("CUDA", "note", f"{why}: training runs on the CPU")
    if torch.version.cuda is None:
        text = f"there is an NVIDIA driver, but torch {torch.__version__} is a build for the CPU"
        return Finding("CUDA", FAIL, text, "pip install torch from https://download.pytorch.org/whl/cu130")
    try:
        torch.cuda.init()
        reason = "torch finds no device"
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    return Finding("CUDA", FAIL, reason, f"update the driver for CUDA {torch.version.cuda}, or install another torch")


def _cards() -> Finding:
    """The visible GPUs, and whether this build of torch has code for them."""
    built = {int(name.partition("_")[2].rstrip("af")) for name in torch.cuda.get_arch_list() if name[:3] == "sm_"}
    cards, memory = {}, set()
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        card = 10 * facts.major + facts.minor
        if built and not any(card // 10 == other // 10 and card >= other for other in built):
            text = f"{facts.name} has compute capability {facts.major}.{facts.minor}; this torch is for {sorted(built)}"
            return Finding("CUDA", FAIL, text, "install a build of torch for this card")
        cards[facts.name] = cards.get(facts.name, 0) + 1
        memory.add(f"{facts.total_memory / 2**30:.0f}")
        if card < 80:
            text = f"{facts.name} has no bf16 and no flash kernels (they need compute capability 8.0)"
            return Finding("CUDA", "note", text, "--param_dtype fp16 on fsdp2, or fp32")
    named = ", ".join(f"{count} x {name}" for name, count in cards.items())
    return Finding("CUDA", "ok", f"{torch.version.cuda}: {named}, {' or '.join(sorted(memory))} GiB each")


def visible_gpus(named: str | None, num_seen: int, num_installed: int) -> Finding:
    """Judge CUDA_VISIBLE_DEVICES. CUDA stops reading it, without a word, at the first GPU that does not exist."""
    if named is None:
        return Finding("visible GPUs", "ok", f"{num_seen} of {num_installed}; CUDA_VISIBLE_DEVICES is not set")
    names, setting = [name.strip() for name in named.split(",")], f"CUDA_VISIBLE_DEVICES={named}"
    if names in ([""], ["-1"]):
        if not num_installed:
            return Finding("visible GPUs", "ok", f"{setting} hides GPUs, and there are none")
        cure = "unset CUDA_VISIBLE_DEVICES"
        return Finding(
            "visible GPUs", FAIL, f"{setting} hides {'all ' * (num_installed > 1)}{counted(num_installed, 'GPU')}", cure
        )
    if len(set(names)) < len(names):
        return Finding("visible GPUs", FAIL, f"{setting} names a GPU twice", "name each GPU once")
    if len(names) > num_seen:
        cure = "unset it, or name GPUs of `nvidia-smi -L`"
        return Finding(
            "visible GPUs", FAIL, f"{setting} names {counted(len(names), 'GPU')}, torch sees {num_seen}", cure
        )
    return Finding("visible GPUs", "ok", f"{num_seen} of {num_installed} ({setting})")


def _num_seen() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _num_installed() -> int:
    if shutil.which("nvidia-smi") is None:
        return _num_seen()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def nccl() -> Finding:
    if not _num_seen():
        return Finding("NCCL", "ok", "not needed without a GPU; ranks speak over gloo")
    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", FAIL, "this torch has no NCCL", "a build of torch with NCCL")
    return Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def launcher_variables(environment: dict[str, str]) -> Finding:
    """Judge the variables of torchrun. If some are left over, a command waits for ranks that never come."""
    needed = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in environment:
        size = environment.get("WORLD_SIZE", "1")
        if size != "1":
            text = f"WORLD_SIZE={size} without RANK: a single process would expect {counted(size, 'rank')}"
            return Finding("launcher", FAIL, text, "unset WORLD_SIZE, or start with torchrun")
        return Finding("launcher", "ok", "one process")
    if missing := [name for name in needed if name not in environment]:
        text = f"RANK={environment['RANK']} is set, but not {', '.join(missing)}"
        return Finding("launcher", FAIL, text, "start with torchrun (scripts/slurm_train_sft.sh), or unset RANK")
    ranks = int(environment["WORLD_SIZE"])
    nodes = ranks // int(environment["LOCAL_WORLD_SIZE"])
    return Finding("launcher", "ok", f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}")


def interfaces() -> Finding:
    existing = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        value = os.environ.get(variable, "")
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        wanted = value.removeprefix("=").split(",")
        is_nccl = variable.startswith("NCCL") and not value.startswith("=")  # there a name is a prefix
        found = [name for name in existing if (name.startswith(tuple(wanted)) if is_nccl else name in wanted)]
        if not found:
            text = f"{variable}={value}, and this host has only {', '.join(existing)}"
            return Finding("network", FAIL, text, f"unset {variable}, or name one of these")
    return Finding("network", "ok", ", ".join(existing))


def host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        cure = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", "note", f"{name} has no address; several nodes would not find each other", cure)
    is_loopback = address.startswith("127.") or address == "::1"
    text = f"{name} is {address}" + (", which only this node can reach; one node is fine" if is_loopback else "")
    return Finding("host name", "note" if is_loopback else "ok", text)


def port() -> Finding:
    if "RANK" in os.environ:
        return Finding("port", "ok", f"{os.environ.get('MASTER_PORT')}, of this launch")
    number = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(number)))
        except (OSError, OverflowError, ValueError) as error:
            text = f"{number} cannot be used: {getattr(error, 'strerror', None) or error}"
            return Finding("port", FAIL, text, "torchrun --standalone, or --master_port with a free port")
    return Finding("port", "ok", f"{number} is free")


def open_files(limit: int) -> Finding:
    if limit != resource.RLIM_INFINITY and limit < MIN_OPEN_FILES:
        text = f"{counted(limit, 'open file')}; {MIN_OPEN_FILES} are needed for sockets and files of weights"
        return Finding("ulimit -n", FAIL, text, "ulimit -n 65536")
    return Finding("ulimit -n", "ok", _limit(limit))


def locked_memory(limit: int) -> Finding:
    """Judge RLIMIT_MEMLOCK, in bytes. InfiniBand pins the memory that it sends from."""
    text = _limit(limit) if limit == resource.RLIM_INFINITY else f"{limit / 2**10:.0f} KiB"
    if not INFINIBAND.is_dir() or not any(INFINIBAND.iterdir()):
        return Finding("ulimit -l", "ok", f"{text}; no InfiniBand here needs it")
    if limit != resource.RLIM_INFINITY:
        cure = "ulimit -l unlimited; Docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity of slurmd"
        return Finding("ulimit -l", FAIL, f"{text}; InfiniBand needs unlimited", cure)
    return Finding("ulimit -l", "ok", text)


def shared_memory(free: int) -> Finding:
    """Judge the free bytes of /dev/shm. NCCL's ranks on one node and vLLM's processes speak through it."""
    text = f"{free / 2**20:.0f} MiB free"
    if free >= MIN_SHARED_MEMORY:
        return Finding("/dev/shm", "ok", text)
    cure = "Docker: --shm-size=8g or --ipc=host"
    if _num_seen() > 1:
        return Finding("/dev/shm", FAIL, f"{text}; NCCL needs 1024", cure)
    return Finding("/dev/shm", "note", f"{text}; several GPUs or vLLM would need 1024", cure)


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

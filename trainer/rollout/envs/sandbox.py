"""What a process of --env_sandbox may see and use: namespaces of Linux, a root of its own, limits, a filter of calls.

`unshare_all` and `confine` are called by the process that is confined, one before and one after the fork that makes it
process 1 of its namespace. Both raise OSError where the machine does not allow it. Nothing is confined in part.

Sources: namespaces(7), pivot_root(2), mount_setattr(2), seccomp(2), capabilities(7).
"""

import contextlib
import ctypes
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.entry import end_with_parent

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000  # linux/sched.h
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
CLONE_NEWCGROUP = 0x2000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000  # linux/mount.h
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_SECCOMP, SECCOMP_FILTER = 38, 24, 28, 22, 2
LOCKED_NOROOT = 0b11 | 0b1100  # root gets no capabilities by exec, and this stays so
FIRST_UID = 2_000_000_000  # each process of root has another real user, whose processes are counted alone
# what programs need, and nothing that is a secret
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM += tuple(f"/etc/{name}" for name in (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "nsswitch.conf", "passwd",
    "group", "ssl/certs", "ca-certificates", "pki/tls/certs",
))  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom")
# the names of environment variables that a process gets; a key is in none of them
VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Box:
    """The limits of one environment. `paths`: files and folders that it may read besides its own."""

    memory_mb: int = 2048  # address space of each process
    processes: int = 256  # and threads
    disk_mb: int = 256  # of its files, which are in memory
    cpu_seconds: int = 3600  # of each process
    paths: tuple[str, ...] = ()


def variables(environment: dict[str, str]) -> dict[str, str]:
    """The environment variables of a confined process."""
    return {name: environment[name] for name in VARIABLES if name in environment} | {"HOME": "/tmp", "TMPDIR": "/tmp"}


def visible_paths(source: str, paths: Iterable[str]) -> list[str]:
    """What a process may read: the system, Python and its modules, the file `source` with its folder, and `paths`.

    The folder of `source` is left out if it holds more than code: a home folder, / or /tmp.
    """
    apart = {"/", "/tmp", os.path.realpath(os.path.expanduser("~"))}
    found = [sys.prefix, sys.base_prefix, *(path or os.getcwd() for path in sys.path)]
    if source.endswith(".py"):
        found.append(os.path.dirname(os.path.abspath(source)))
    found = [path for path in found if os.path.realpath(path) not in apart]
    return [*SYSTEM, *found, *([source] if source.endswith(".py") else []), *map(os.path.expanduser, paths)]


def unshare_all() -> None:
    """Give this process new namespaces. Its next child is process 1 of the new pid namespace."""
    if _libc.unshare(NAMESPACES) == 0:  # with CAP_SYS_ADMIN, such as root
        return
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(NAMESPACES | CLONE_NEWUSER), "no user, pid, mount and network namespaces (unshare)")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def confine(box: Box, visible: Iterable[str], kept: int, number: int) -> None:
    """Confine this process for good, and close all files but `kept` and the standard streams. `number` is its own."""
    end_with_parent()
    os.setsid()
    _new_root(visible, box.disk_mb)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    size, disk = box.memory_mb << 20, box.disk_mb << 20
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, box.processes),
        (resource.RLIMIT_CPU, box.cpu_seconds),
        (resource.RLIMIT_NOFILE, 1024),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _drop_rights(FIRST_UID + number)
    _filter_calls()


# --- files


def _new_root(visible: Iterable[str], disk_mb: int) -> None:
    """An empty root in memory, with the `visible` paths in it, to be read only."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {}  # opened now, since the new root hides some of them
    for path in visible:
        for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
            if os.path.exists(place) and place not in sources:
                sources[place] = os.open(place, os.O_PATH)
    root = "/tmp" if os.path.isdir("/tmp") else "/mnt"
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES if os.path.exists(f"/dev/{name}")}
    here = os.getcwd()
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mb}m,mode=755,nr_inodes=65536")
    for place in sorted(sources):
        _show(sources[place], place, root)
    for name, opened in devices.items():
        target = f"{root}/dev/{name}"
        _empty_file(target)
        _mount(f"/proc/self/fd/{opened}", target, None, MS_BIND)
    for name in ("tmp", "dev/shm", "var/tmp", "run"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    os.makedirs(f"{root}/proc", exist_ok=True)
    # a container with a masked /proc allows no new one; then there is none
    _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    os.chdir(root)
    _check(_libc.syscall(_calls()["pivot_root"], b".", b"."), "no new root (pivot_root)")
    _check(_libc.umount2(b".", MNT_DETACH), "the old root stays (umount)")
    os.chdir(here if os.path.isdir(here) else "/tmp")


def _show(opened: int, place: str, root: str) -> None:
    """Bind the open path `opened` at `place` below the new root, unless a folder above it is there already."""
    target = root + place
    if os.path.lexists(target):
        return
    if stat.S_ISDIR(os.fstat(opened).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        _empty_file(target)
    _mount(f"/proc/self/fd/{opened}", target, None, MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    call = _libc.syscall(442, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))
    _check(call, "no read-only mounts (mount_setattr needs Linux 5.12)")


def _empty_file(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w"):
        pass


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    text = kind.encode() if kind else None
    done = _libc.mount(source.encode(), target.encode(), text, ctypes.c_ulong(flags), data.encode() or None)
    _check(done, f"no mount of {source} (mount)")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


# --- rights


def _drop_rights(user: int) -> None:
    """No capabilities, not even after exec, and never more rights than now. Root gets the real user `user`."""
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(PR_SET_SECUREBITS, LOCKED_NOROOT, 0, 0, 0)
    if os.getuid() == 0:
        _separate_user(user)
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no PR_SET_NO_NEW_PRIVS")
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    _check(_libc.syscall(_calls()["capset"], header, none), "capabilities stay (capset)")


def _separate_user(user: int) -> None:
    """Another real user. Root's processes are not counted for RLIMIT_NPROC, but those of a real user are."""
    with contextlib.suppress(OSError):  # root of a container, with a few users; its processes are counted
        os.setresuid(user, -1, -1)


# --- calls of the kernel

# x86_64, aarch64: asm/unistd_64.h, asm-generic/unistd.h
DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268), "unshare": (272, 97),
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "setuid": (105, 146),
    "setreuid": (113, 145), "setresuid": (117, 147), "setfsuid": (122, 151), "setgid": (106, 144),
    "setregid": (114, 143), "setresgid": (119, 149), "setgroups": (116, 159), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "pidfd_getfd": (438, 438), "kexec_load": (246, 104), "finit_module": (313, 273), "init_module": (175, 105),
    # memory in no address space and in no file: no limit would count it
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
}  # fmt: skip
OTHERS = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "capset": (126, 91), "seccomp": (317, 277)}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # linux/audit.h
FAMILIES = (2, 10, 16)  # AF_INET and AF_INET6, without a network, and AF_NETLINK; sockets of paths are no files here
LOAD, EQUAL, AT_LEAST, SOME_BITS, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


def _calls() -> dict[str, int]:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"the filter of system calls does not know {machine}")
    return {name: numbers[ARCHITECTURES[machine][0]] for name, numbers in (DENIED | OTHERS).items()}


def call_filter() -> bytes:
    """The program of BPF for seccomp(2).

    It denies what could reach another process, sockets that are paths, and memory that no limit counts.
    """
    calls, program = _calls(), []

    def add(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        program.append(struct.pack("HBBI", code, yes, no, value))

    add(LOAD, ARCHITECTURE)
    add(EQUAL, ARCHITECTURES[platform.machine()][1], 1, 0)
    add(ANSWER, KILL)
    add(LOAD, NUMBER)
    add(AT_LEAST, 0x40000000, 0, 1)  # the x32 calls of x86_64
    add(ANSWER, KILL)
    for name in DENIED:
        add(EQUAL, calls[name], 0, 1)
        add(ANSWER, ERROR | EPERM)
    add(EQUAL, calls["clone3"], 0, 1)  # its flags are in memory, which a filter cannot read; libraries then use clone
    add(ANSWER, ERROR | ENOSYS)
    add(EQUAL, calls["clone"], 0, 4)
    add(LOAD, FIRST_ARGUMENT)
    add(SOME_BITS, NAMESPACES | CLONE_NEWUSER | CLONE_NEWCGROUP, 0, 1)
    add(ANSWER, ERROR | EPERM)
    add(ANSWER, ALLOW)
    add(EQUAL, calls["socket"], 0, len(FAMILIES) + 2)
    add(LOAD, FIRST_ARGUMENT)
    for number, family in enumerate(FAMILIES):
        add(EQUAL, family, len(FAMILIES) - number, 0)
    add(ANSWER, ERROR | EAFNOSUPPORT)
    add(ANSWER, ALLOW)
    return b"".join(program)


def _filter_calls() -> None:
    program = call_filter()
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held))  # struct sock_fprog
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, header, 0, 0), "no filter of system calls (seccomp)")

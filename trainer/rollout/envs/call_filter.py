"""The numbers of Linux's system calls, and the filter of them for --env_sandbox. Sources: seccomp(2), bpf(4)."""

import platform
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000  # linux/sched.h
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
CLONE_NEWCGROUP = 0x2000000
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
    "semget": (64, 190), "vmsplice": (278, 75), "io_setup": (206, 0),
}  # fmt: skip
OTHERS = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "capset": (126, 91), "seccomp": (317, 277),
          "setsockopt": (54, 208)}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # linux/audit.h
FAMILIES = (2, 10, 16)  # AF_INET and AF_INET6, without a network, and AF_NETLINK; sockets of paths are no files here
LOAD, EQUAL, AT_LEAST, SOME_BITS, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND, THIRD = 0, 4, 16, 24, 32  # offsets in struct seccomp_data
SOL_SOCKET, BUFFERS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and both with FORCE, asm-generic/socket.h
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


def calls() -> dict[str, int]:
    """{name: number} on this machine. Raises OSError on one that is not known."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"the filter of system calls does not know {machine}")
    return {name: numbers[ARCHITECTURES[machine][0]] for name, numbers in (DENIED | OTHERS).items()}


def call_filter() -> bytes:
    """The program of BPF for seccomp(2).

    It denies what could reach another process, sockets that are paths, and memory that no limit counts.
    """
    numbers, program = calls(), []

    def add(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        program.append(struct.pack("HBBI", code, yes, no, value))

    add(LOAD, ARCHITECTURE)
    add(EQUAL, ARCHITECTURES[platform.machine()][1], 1, 0)
    add(ANSWER, KILL)
    add(LOAD, NUMBER)
    add(AT_LEAST, 0x40000000, 0, 1)  # the x32 calls of x86_64
    add(ANSWER, KILL)
    for name in DENIED:
        add(EQUAL, numbers[name], 0, 1)
        add(ANSWER, ERROR | EPERM)
    add(EQUAL, numbers["clone3"], 0, 1)  # its flags are in memory, which a filter cannot read; libraries then use clone
    add(ANSWER, ERROR | ENOSYS)
    add(EQUAL, numbers["clone"], 0, 4)
    add(LOAD, FIRST_ARGUMENT)
    add(SOME_BITS, NAMESPACES | CLONE_NEWUSER | CLONE_NEWCGROUP, 0, 1)
    add(ANSWER, ERROR | EPERM)
    add(ANSWER, ALLOW)
    add(EQUAL, numbers["setsockopt"], 0, len(BUFFERS) + 5)
    add(LOAD, SECOND)
    add(EQUAL, SOL_SOCKET, 0, len(BUFFERS) + 1)
    add(LOAD, THIRD)
    for number, option in enumerate(BUFFERS):
        add(EQUAL, option, len(BUFFERS) - number, 0)
    add(ANSWER, ALLOW)
    add(ANSWER, ERROR | EPERM)
    add(EQUAL, numbers["socket"], 0, len(FAMILIES) + 2)
    add(LOAD, FIRST_ARGUMENT)
    for number, family in enumerate(FAMILIES):
        add(EQUAL, family, len(FAMILIES) - number, 0)
    add(ANSWER, ERROR | EAFNOSUPPORT)
    add(ANSWER, ALLOW)
    return b"".join(program)

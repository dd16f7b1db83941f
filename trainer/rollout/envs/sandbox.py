"""What a process of --env_sandbox may see and use: namespaces of Linux, a root of its own, limits, a filter of calls.

`unshare_all` and `confine` are called by the process that is confined, one before and one after the fork that makes it
process 1 of its namespace. Both raise OSError where the machine does not allow it. Nothing is confined in part.
Root becomes another user first, which owns nothing outside. Inside it is still user 0, without any right.

Sources: namespaces(7), pivot_root(2), mount_setattr(2), seccomp(2), capabilities(7).
"""

import ctypes
import importlib.machinery
import os
import resource
import signal
import stat
import struct
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.entry import end_with_parent
from trainer.rollout.envs.call_filter import CLONE_NEWUSER, EPERM, NAMESPACES, call_filter, calls

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000  # linux/mount.h
MNT_DETACH, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_IDMAP = 2, 1, 2, 0x100000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000  # linux/fcntl.h
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 4, 38, 24, 28
PR_SET_SECCOMP, SECCOMP_FILTER = 22, 2
LOCKED_NOROOT = 0b11 | 0b1100  # root gets no capabilities by exec, and this stays so
FIRST_UID = 2_000_000_000  # each sandbox of root is another user, if the machine has so many
OPEN_FILES = 256  # also of sockets and pipes, whose buffers are memory of the kernel
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

NO_NAMESPACES = "no user, pid, mount and network namespaces (unshare)"
READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
Trees = dict[str, tuple[int, tuple[str, ...]]]  # place: an open copy of what is mounted there, and names in it to hide

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


def visible_paths(source: str, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What a process may read: {path: names in it that are hidden, since they begin with a dot}.

    This is the system, Python and its modules, this package, the folder of the code `source`, and `paths`. The folder
    where the trainer was started is on Python's path. It is left out, like a home folder, / and /tmp.
    """
    here, package = os.path.realpath(os.getcwd()), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    apart = {"/", "/tmp", os.path.realpath(os.path.expanduser("~"))}
    installed = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), package}
    installed |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    found = dict.fromkeys((*SYSTEM, *(path for path in installed if os.path.realpath(path) not in apart)), ())
    for path in sys.path:
        real = os.path.realpath(path)
        if os.path.commonpath([here, real]) != real and real not in (*apart, os.path.dirname(package)):
            found.setdefault(path, _dot_names(path))
    folder = _folder_of(source)
    if folder and os.path.realpath(folder) not in apart:
        found.setdefault(folder, _dot_names(folder))
    if source.endswith(".py"):
        found.setdefault(os.path.abspath(source), ())
    return found | dict.fromkeys(map(os.path.expanduser, paths), ())


def _dot_names(folder: str) -> tuple[str, ...]:
    return tuple(name for name in os.listdir(folder) if name[0] == ".") if os.path.isdir(folder) else ()


def _folder_of(source: str) -> str:
    """The folder of a file, of a package or of a module. Nothing is imported. "" if there is none."""
    if source.endswith(".py"):
        return os.path.dirname(os.path.abspath(source))
    found = importlib.machinery.PathFinder.find_spec(source.partition(".")[0])
    places = list(found.submodule_search_locations or [found.origin and os.path.dirname(found.origin)]) if found else []
    return os.path.abspath(places[0]) if places and places[0] else ""


def unshare_all(visible: dict[str, tuple[str, ...]], number: int) -> Trees:
    """Give this process new namespaces, and copy the `visible` mounts. Its next child is process 1.

    Root becomes a user of its own. `number` tells one sandbox from another.
    """
    user, group = os.getuid(), os.getgid()
    if user != 0:
        _check(_libc.unshare(NAMESPACES | CLONE_NEWUSER), NO_NAMESPACES)
        _write_maps("self", (user, user), (group, group))
        return _copies(visible, None)
    with open("/proc/self/uid_map") as file:
        other = another_user(number, file.read())
    owner = _user_namespace(other)
    try:
        trees = _copies(visible, owner)
    except PermissionError:  # root of a container has less rights
        trees = None
    _become_other(owner)
    _check(_libc.unshare(NAMESPACES), NO_NAMESPACES)
    os.close(owner)
    return _copies(visible, None) if trees is None else trees


def _become_other(owner: int) -> None:
    """Join the user namespace `owner`, as its user 0."""
    try:
        os.setgroups([])
        _check(_libc.setns(owner, CLONE_NEWUSER), "setns")
        os.setresgid(0, 0, 0)  # of the new namespace
        os.setresuid(0, 0, 0)
    except OSError as error:
        raise OSError(error.errno, f"root cannot become another user: {error.strerror}") from None


def another_user(number: int, uid_map: str) -> int:
    """A user of this machine that is not root. `uid_map`: /proc/self/uid_map. Raises OSError if there is none."""
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    first, _, count = max(ranges, key=lambda found: found[2])
    if first <= FIRST_UID and FIRST_UID + number < first + count:
        return FIRST_UID + number
    if count < 2:
        raise OSError(EPERM, "root has no second user here, so the sandbox would be root")
    return first + count - 1 - number % (count // 2)  # a container


def _user_namespace(user: int) -> int:
    """An open user namespace, in which `user` is 0. No process is in it: root must copy its mounts from outside."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        end_with_parent()
        os.write(writes, bytes([ctypes.get_errno() if _libc.unshare(CLONE_NEWUSER) else 0]))
        signal.pause()
    try:
        failed = os.read(reads, 1)[0]
        if failed:
            raise OSError(failed, f"{NO_NAMESPACES}: {os.strerror(failed)}")
        _write_maps(str(child), (0, user), (0, user))
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def _write_maps(process: str, user: tuple[int, int], group: tuple[int, int]) -> None:
    maps = ("setgroups", "deny"), ("uid_map", f"{user[0]} {user[1]} 1"), ("gid_map", f"{group[0]} {group[1]} 1")
    for name, text in maps:
        try:
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, f"no other user or group ({name}): {error.strerror}") from None


def confine(box: Box, trees: Trees, kept: int) -> None:
    """Confine this process for good, and close all files but `kept` and the standard streams."""
    end_with_parent()
    os.setsid()
    _new_root(trees, box.disk_mb)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    size, disk = box.memory_mb << 20, box.disk_mb << 20
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, box.processes),
        (resource.RLIMIT_CPU, box.cpu_seconds),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    _drop_rights()
    _filter_calls()


# --- files


def _copies(visible: dict[str, tuple[str, ...]], owner: int | None) -> Trees:
    """Copies of the mounts at the `visible` paths, to be read only.

    `owner` is a user namespace. What belongs to root outside then belongs to user 0 of it, so that it can be read. A
    file system without such a mapping is copied as it is: what only root can read is then closed.
    """
    trees = {}
    for path, hidden in visible.items():
        for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
            if os.path.exists(place) and place not in trees:
                trees[place] = _copy(place), hidden
                mapped = owner is not None and path not in SYSTEM
                if not mapped or _set_mount(trees[place][0], READ_ONLY | MOUNT_ATTR_IDMAP, owner):
                    done = _set_mount(trees[place][0], READ_ONLY)
                    _check(done, "no read-only mounts (mount_setattr needs Linux 5.12)")
    return trees


def _copy(place: str) -> int:
    tree = _libc.syscall(
        calls()["open_tree"], AT_FDCWD, os.fsencode(place), OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    )
    _check(tree < 0, f"no copy of the mount {place} (open_tree)")
    return tree


def _set_mount(tree: int, attributes: int, owner: int = 0) -> int:
    values = struct.pack("QQQQ", attributes, 0, MS_PRIVATE, owner)  # struct mount_attr
    call = calls()["mount_setattr"]
    return _libc.syscall(call, tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, values, len(values))


def _new_root(trees: Trees, disk_mb: int) -> None:
    """An empty root in memory, with the `trees` in it."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = "/tmp" if os.path.isdir("/tmp") else "/mnt"
    here = os.getcwd()
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_mb}m,mode=755,nr_inodes=65536")
    for place in sorted(trees):
        tree, names = trees[place]
        _show(tree, root + place)
        for path in (f"{place}/{name}" for name in names):
            if path not in trees:
                _hide(root + path)
    os.makedirs(root + here, exist_ok=True)  # for relative paths
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            _show(_copy(f"/dev/{name}"), f"{root}/dev/{name}")
    for name in ("tmp", "dev/shm", "var/tmp", "run"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    os.makedirs(f"{root}/proc", exist_ok=True)
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    done = _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", flags, None)
    _check(done, "no new /proc, as in a container that hides parts of its own (mount)")
    os.chdir(root)
    _check(_libc.syscall(calls()["pivot_root"], b".", b"."), "no new root (pivot_root)")
    _check(_libc.umount2(b".", MNT_DETACH), "the old root stays (umount)")
    os.chdir(here)


def _show(tree: int, target: str) -> None:
    """Mount the copy `tree` at `target`, unless a folder above it is there already."""
    if os.path.lexists(target):
        os.close(tree)
        return
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        _empty_file(target)
    _attach(tree, target)


def _attach(tree: int, target: str) -> None:
    done = _libc.syscall(calls()["move_mount"], tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    _check(done, f"no mount of {target} (move_mount)")
    os.close(tree)


def _hide(target: str) -> None:
    """Mount something empty over a file or folder. A link stays: its target may have a name that is shown."""
    try:
        kind = os.lstat(target).st_mode
    except PermissionError:  # its folder is closed to this user
        return
    if stat.S_ISDIR(kind):
        _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755,nr_inodes=64")
    elif not stat.S_ISLNK(kind):
        _attach(_copy("/dev/null"), target)


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


def _drop_rights() -> None:
    """No capabilities, not even after exec, and never more rights than now."""
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(PR_SET_SECUREBITS, LOCKED_NOROOT, 0, 0, 0)
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no PR_SET_NO_NEW_PRIVS")
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    _check(_libc.syscall(calls()["capset"], header, none), "capabilities stay (capset)")
    _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of the user closes a process's own files in /proc


def _filter_calls() -> None:
    program = call_filter()
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(held))  # struct sock_fprog
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, header, 0, 0), "no filter of system calls (seccomp)")

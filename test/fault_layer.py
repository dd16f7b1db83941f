"""A layer between a process and the files below a folder: operation number n fails, kills, or comes as the clock jumps.

Operations are opens, writes, fsyncs, renames, and new folders and links, in the order in which Python asks for them.
What Rust writes (safetensors' `save_file`, tokenizers) is not seen. After a jump, `time.time` and the times of written
files are of the new clock. `time.monotonic` is not: no clock of Linux that it reads can be set.
"""

import builtins
import errno
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

JUMPS = {"an hour back": -3600.0, "a day on": 86400.0}  # in seconds
KINDS = ("ENOSPC", "EIO", "kill", *JUMPS)
READ = "open to read"  # a full disk does not fail it
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultLayer:
    """Counts operations below `folder`. From number `at` on, a full disk fails all that write; another fault comes once."""

    def __init__(self, folder: Path, kind: str = "", at: int = 0):
        self.folder, self.kind, self.at = os.path.realpath(folder), kind, at
        self.seen: list[tuple[str, str]] = []  # (operation, path)
        self.jump = 0.0  # of the clock, in seconds

    def point(self, operation: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        """One operation. `half` does a part of it, which a fault leaves behind."""
        self.seen.append((operation, os.path.relpath(path, self.folder)))
        is_full = self.kind == "ENOSPC" and operation not in (READ, "fsync", "rename") and len(self.seen) > self.at > 0
        if len(self.seen) != self.at and not is_full:
            return
        if self.kind in JUMPS:
            self.jump = JUMPS[self.kind]
            return
        half()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number), path)

    def covers(self, path, dir_fd: int | None = None) -> str | None:
        """The whole path, if it is below the folder."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        path = os.path.normpath(os.path.join(base, os.fspath(path)))
        return path if path.startswith(self.folder + os.sep) else None

    def install(self) -> None:
        """Put the layer into this process, for good."""
        real_open = builtins.open

        def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest, **named):
            path, writes = self.covers(file), set(mode) & set("wax+")
            if path is None:
                return real_open(file, mode, buffering, encoding, errors, newline, *rest, **named)
            self.point("open" if writes else READ, path)
            if not writes:
                return real_open(file, mode, buffering, encoding, errors, newline, *rest, **named)
            raw = _File(path, mode.translate({ord("b"): None, ord("t"): None}), self)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = io.open = open_file
        real_time = time.time
        time.time, time.time_ns = lambda: real_time() + self.jump, lambda: int(1e9 * (real_time() + self.jump))
        os.write = self._write(os.write)
        os.fsync = self._fsync(os.fsync)
        os.open = self._named("open", os.open)
        for name, operation in {"replace": "rename", "rename": "rename", "mkdir": "mkdir", "symlink": "link"}.items():
            setattr(os, name, self._named(operation, getattr(os, name)))

    def _named(self, operation: str, real: Callable) -> Callable:
        def call(first, *rest, dir_fd=None, **named):
            path = self.covers(rest[0] if operation in ("rename", "link") else first, dir_fd)
            if path is not None:
                reads = operation == "open" and not rest[0] & WRITES
                self.point(READ if reads else operation, path)
            return real(first, *rest, **named, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return call

    def _write(self, real: Callable) -> Callable:
        def write(handle, data):
            if path := self.covers(os.readlink(f"/proc/self/fd/{handle}")):
                self.point("write", path, lambda: real(handle, data[: len(data) // 2]))
            return real(handle, data)

        return write

    def _fsync(self, real: Callable) -> Callable:
        def fsync(handle):
            if path := self.covers(
                os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
            ):
                self.point("fsync", path)
            return real(handle)

        return fsync


class _File(io.FileIO):
    """A file without a buffer, whose writes are operations."""

    def __init__(self, path: str, mode: str, layer: FaultLayer):
        super().__init__(path, mode)
        self._layer = layer

    def write(self, data) -> int:
        part = memoryview(data).cast("B")
        self._layer.point("write", self.name, lambda: super(_File, self).write(part[: len(part) // 2]))
        return super().write(data)

    def close(self) -> None:
        if self._layer.jump and not self.closed:
            os.utime(self.fileno(), (time.time(), time.time()))
        super().close()

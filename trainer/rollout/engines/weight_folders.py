"""Folders of weights that the ranks of a machine share: each version is written once, and stays while servers read it.

Ranks meet by locks of files alone. So threads may come at any time, and the kernel frees the locks of a rank that dies.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator

from trainer.model_folders.model_writer import commit_folder, fresh_folder

LOCK, READERS = "lock", "readers"  # files: of the folder of all versions, and in each version


class WeightFolders:
    """`path` is the folder of all versions. It exists only while it holds one."""

    def __init__(self, path: str):
        self.path = path

    def clear(self) -> None:
        """Remove what a run that was killed has left. No rank may use the folder yet."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, fill: Callable[[str], str]) -> str:
        """Make a new version. `fill(folder)` writes it, and returns its name. Other versions go first, if nobody reads them.

        The caller has its `turn`. Returns the folder of the version.
        """
        self.remove_unread()
        temporary = fresh_folder(os.path.join(self.path, "weights"))
        name = fill(temporary)
        open(os.path.join(temporary, READERS), "w").close()
        # a new name for new weights: a file system of the network may show the former content of a path
        commit_folder(temporary, self.folder_of(name))
        return self.folder_of(name)

    def folder_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.folder_of(name), READERS))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Only one rank, or one thread of it, is inside."""
        while True:
            os.makedirs(self.path, exist_ok=True)
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(open(os.path.join(self.path, LOCK), "a"))
                except FileNotFoundError:  # `leave` of another rank has removed the folder meanwhile
                    continue
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_file_of(file, file.name):  # else it has removed the file
                    yield
                    return

    def begin_reading(self, name: str) -> contextlib.AbstractContextManager:
        """Keep a version until the context ends. The caller has its `turn`, or all ranks wait for each other."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(os.path.join(self.folder_of(name), READERS), "r+"))
            fcntl.flock(file, fcntl.LOCK_SH)
            return stack.pop_all()

    def remove_unread(self) -> None:
        """Remove all versions that nobody reads, and what a rank that died has begun to write."""
        for name in os.listdir(self.path):
            if name != LOCK and not self._is_read(name):
                shutil.rmtree(self.folder_of(name), ignore_errors=True)

    def _is_read(self, name: str) -> bool:
        try:
            with open(os.path.join(self.folder_of(name), READERS), "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno == errno.EWOULDBLOCK
        return False

    def leave(self) -> None:
        """Remove what no other rank reads. The last rank removes the folder."""
        with contextlib.suppress(OSError):
            if not os.path.isdir(self.path):
                return
            with self.turn():
                self.remove_unread()
                if os.listdir(self.path) == [LOCK]:
                    os.remove(os.path.join(self.path, LOCK))
                    os.rmdir(self.path)


def _is_file_of(file, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False

"""A file of a checkpoint that a rank needs whole: its bytes come from the disk once, and are hashed meanwhile."""

import os

from safetensors import safe_open

from trainer.checkpoints.checkpoint_store import DamagedFile, difference, hash_file


def open_checked(path: str, wanted: dict) -> "WholeFile":
    """Read a file of a checkpoint. Raises DamagedFile if it is not as its entry in the manifest says."""
    name = os.path.basename(path)
    try:
        file = WholeFile(path)
    except OSError as error:
        raise DamagedFile(f"{name}: {error.strerror}") from None
    if damage := difference(name, file.found, wanted):
        raise DamagedFile(damage)
    return file


class WholeFile:
    """A safetensors file that was hashed just now. `found` is its {"size", "blake2b"}.

    Its tensors are then mapped: the system still has the bytes, and the process holds one tensor at a time.
    """

    def __init__(self, path: str):
        self.found, self._path, self._file = hash_file(path), path, None

    def get_slice(self, key: str):
        """The tensor, to be cut."""
        if self._file is None:  # only a file that is not damaged
            self._file = safe_open(self._path, framework="pt")
        return self._file.get_slice(key)

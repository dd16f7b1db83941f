"""A file of a checkpoint that a rank needs whole: it is read once, and hashed meanwhile."""

import hashlib
import json
import os

import torch
from safetensors.torch import _TYPES

from trainer.checkpoints.checkpoint_store import CHUNK_BYTES, DamagedFile, difference


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
    """A safetensors file in memory. `found` is its {"size", "blake2b"}."""

    def __init__(self, path: str):
        self._bytes, digest, size = bytearray(os.path.getsize(path)), hashlib.blake2b(digest_size=32), 0
        view = memoryview(self._bytes)
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(view[size : size + CHUNK_BYTES]):
                digest.update(view[size : size + count])
                size += count
        self.found, self._entries, self._start = {"size": size, "blake2b": digest.hexdigest()}, None, 0

    def get_slice(self, key: str) -> torch.Tensor:
        """The tensor, to be cut. It shares the memory of this file."""
        if self._entries is None:
            self._start = 8 + int.from_bytes(self._bytes[:8], "little")
            self._entries = json.loads(self._bytes[8 : self._start])
        entry = self._entries[key]
        (first, last), dtype = entry["data_offsets"], _TYPES[entry["dtype"]]
        count, at = (last - first) // dtype.itemsize, self._start + first
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=at).view(entry["shape"])

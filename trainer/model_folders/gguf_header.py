"""Check the header of a GGUF file before a library reads it: no length or count in it may exceed the file.

The reader of the package gguf believes them: an array of 2^60 numbers in a file of 100 bytes fills the memory.
Source of the format: docs/gguf.md of the repository ggml.
"""

import os
import struct
from typing import BinaryIO

from trainer.errors import UserError
from trainer.limits import opened
from trainer.metrics import counted

BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its kind
WHOLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
TEXT, ARRAY = 8, 9
MOST_DEPTH = 4  # of arrays in arrays
WEIGHTS_OF_BYTE = 8  # no quantization has more


def check_gguf(path: str) -> dict[str, int]:
    """The whole numbers of the header by name, and the number of tensors under "tensors". Raises UserError and OSError."""
    with opened(path, "SOURCE") as file:
        try:
            return _Header(file).read()
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            found = f"{path} has a broken header, or is no GGUF file ({error})"
            raise UserError("SOURCE", found, "the file as it was published") from None


def check_size(num_weights: int, path: str) -> None:
    """Raise UserError for a config of far more weights than the file can hold."""
    if num_weights > WEIGHTS_OF_BYTE * os.path.getsize(path):
        found = f"{path} describes a model of {counted(num_weights, 'weight')}, which it cannot hold"
        raise UserError("SOURCE", found, "a GGUF file with the whole model")


class _Header:
    def __init__(self, file: BinaryIO):
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def read(self) -> dict[str, int]:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_values = struct.unpack("<IQQ", self._file.read(20))
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        found = {}
        for _ in range(self._count(num_values, 13)):
            name, kind = self._text(), self._number("<I")
            value = self._value(kind, 0)
            if value is not None:
                found[name] = value
        for _ in range(self._count(num_tensors, 24)):
            self._skip(self._number("<Q"))
            self._skip(8 * self._number("<I") + 12)  # sizes, kind and place
        layers = [value for name, value in found.items() if name.endswith(".block_count")]
        if any(not 0 <= value <= num_tensors for value in layers):
            raise ValueError(f"{counted(max(layers), 'layer')} and {counted(num_tensors, 'tensor')}")
        return {**found, "tensors": num_tensors}

    def _value(self, kind: int, depth: int) -> int | None:
        """A whole number, or None for any other value, which is skipped."""
        if kind in WHOLE:
            return self._number(WHOLE[kind])
        if kind in BYTES:
            self._skip(BYTES[kind])
        elif kind == TEXT:
            self._skip(self._number("<Q"))
        elif kind == ARRAY and depth < MOST_DEPTH:
            of, count = struct.unpack("<IQ", self._file.read(12))
            if of in BYTES:
                self._skip(BYTES[of] * count)
            else:
                for _ in range(self._count(count, 8)):
                    self._value(of, depth + 1)
        else:
            raise ValueError(f"a value of kind {kind}")
        return None

    def _text(self) -> str:
        return self._file.read(self._count(self._number("<Q"), 1)).decode()

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._file.read(struct.calcsize(form)))[0]

    def _count(self, count: int, least: int) -> int:
        """A number of things of at least so many bytes, which the rest of the file has room for."""
        if count * least > self._size - self._file.tell():
            raise ValueError("it is cut off, or claims more than it holds")
        return count

    def _skip(self, size: int) -> None:
        self._file.seek(self._count(size, 1), os.SEEK_CUR)

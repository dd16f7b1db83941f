"""Data files of others, before a library reads them: regular files that do not grow to many times their size."""

import bz2
import errno
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.errors import UserError
from trainer.limits import MB, limit, opened, too_large
from trainer.metrics import counted

PART = 1 << 20
BATCH_BYTES = 64 * MB  # of decoded rows that are counted at a time
UNPACK = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTD, ZIP, PARQUET = b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"PAR1"
COUNTED = 64 * MB  # a compressed stream above this size is not counted before it is read


def most_bytes(size: int) -> int:
    """The bytes that a compressed file of `size` bytes may grow to."""
    return max(limit("unpacked_mb") * MB, limit("ratio") * size)


def check_file(path: str, where: str, streamed: bool = False) -> None:
    """Raise UserError for a file that is not regular, or that unpacks to far more than its size.

    The count stops at the limit and holds one part at a time. A large compressed file that is `streamed` is not counted.
    """
    with opened(path, where) as file:
        size, head = file.seek(0, io.SEEK_END), b""
        file.seek(0)
        head = file.read(8)
        file.seek(0)
        if head.startswith(PARQUET):
            _check_parquet(file, size, where)
        elif not (streamed and size > COUNTED):
            _check_packed(file, head, size, where)
        _check_holes(file, size, where)


def _check_holes(file: BinaryIO, size: int, where: str) -> None:
    """Refuse a file with a long part that was never written. It takes no space on the disk, and reads as zeros."""
    place = 0
    try:
        while place < size:
            start = os.lseek(file.fileno(), place, os.SEEK_DATA)
            if start - place > limit("row_mb") * MB:
                break
            place = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        else:
            return
    except OSError as error:
        if error.errno != errno.ENXIO or size - place <= limit("row_mb") * MB:  # no data behind; or it knows no holes
            return
    raise too_large(where, "a part that was never written and reads as zeros", "row_mb")


def check_columns(count: int, where: str) -> None:
    if count > limit("columns"):
        raise too_large(where, counted(count, "column"), "columns")


def _check_packed(file: BinaryIO, head: bytes, size: int, where: str) -> None:
    most, found = most_bytes(size), 0
    try:
        for part in _unpacked(file, head):
            found += len(part)
            if found > most:
                raise too_large(where, f"{counted(size, 'byte')} that unpack to more than {most // MB} MB", "ratio")
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError, NotImplementedError):
        return  # its reader says what is wrong with it


def _unpacked(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    """The content of a compressed file, part by part. Nothing for a file that is not compressed."""
    for magic, unpack in UNPACK.items():
        if head.startswith(magic):
            with unpack(file, "rb") as content:
                yield from iter(lambda: content.read(PART), b"")
    if head.startswith(ZSTD):
        yield from _unpacked_zstd(file)
    if head.startswith(ZIP):
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                with archive.open(member) as content:
                    yield from iter(lambda content=content: content.read(PART), b"")


def _unpacked_zstd(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard  # an optional package
    except ImportError:
        return  # then nothing here can unpack it
    with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as content:
        try:
            yield from iter(lambda: content.read(PART), b"")
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None


def _check_parquet(file: BinaryIO, size: int, where: str) -> None:
    """Its rows may repeat a value of a dictionary without end, so only decoded rows show their size."""
    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowException, OSError, ValueError):
        return
    check_columns(table.metadata.num_columns, where)
    _check_names(table.schema_arrow, where)
    most, found = most_bytes(size), 0
    if _upper_bound(table.metadata) <= most:
        return
    rows = max(1, min(1 << 16, BATCH_BYTES // max(1, _largest_value(table.metadata))))
    try:
        for batch in table.iter_batches(batch_size=rows, use_threads=False):
            found += batch.nbytes
            if found > most:
                raise too_large(where, f"{counted(size, 'byte')} whose rows take more than {most // MB} MB", "ratio")
    except (pa.ArrowException, OSError):
        return


def _check_names(fields: Any, where: str) -> None:
    """Refuse two fields of one name inside an object: pyarrow would take the last one in silence."""
    names = [field.name for field in fields]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(where, f"two columns or keys are named {twice!r}", "different names")
    for field in fields:
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            _check_names(kind, where)


def _upper_bound(metadata: Any) -> int:
    """Bytes of all rows if each value were as long as all that its chunk holds."""
    return sum(chunk.num_values * max(8, chunk.total_uncompressed_size) for chunk in _chunks(metadata))


def _largest_value(metadata: Any) -> int:
    return max((chunk.total_uncompressed_size for chunk in _chunks(metadata)), default=0)


def _chunks(metadata: Any) -> Iterator[Any]:
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            yield metadata.row_group(group).column(column)


def check_files(paths: list[str], where: str) -> None:
    """`check_file` for each file of a set."""
    for path in paths:
        try:
            check_file(path, where if where.endswith(path) else f"{where} {path}")
        except OSError as error:
            raise UserError(where, f"{path}: {error.strerror or error}") from None

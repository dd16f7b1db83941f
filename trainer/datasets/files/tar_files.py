"""Read rows from .tar shards of webdataset: members NAME.json and NAME.txt, one after the other, are one row."""

import tarfile
from collections.abc import Iterator

import datasets
import fsspec

from trainer.limits import MB, limit, too_large

KINDS = ("json", "txt")


class _Header(tarfile.TarInfo):
    """A header that is cut off or damaged is an error. tarfile itself would take it for the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # the mark of the end
            raise
        except tarfile.HeaderError as error:
            raise ValueError(f"the tar file is cut off or damaged: {error}") from None


def open_tar_files(files: list[str], line: str) -> datasets.IterableDataset:
    """The rows of tar files, which may be URLs. The column `line` holds the JSON, the column `txt` the text."""
    text = datasets.Value("string")
    features, options = datasets.Features({line: text, "txt": text}), {"files": files, "line": line}
    return datasets.IterableDataset.from_generator(_read, features=features, gen_kwargs=options)


def _read(files: list[str], line: str) -> Iterator[dict]:
    for name in files:
        for row in _rows_of(name):
            yield {line: row.get("json"), "txt": row.get("txt")}


def _rows_of(name: str) -> Iterator[dict[str, str]]:
    """The rows of a file. Raises ValueError for a member of another kind, and for two members of one name."""
    row, row_name = {}, None
    with (
        fsspec.open(name, "rb", compression="infer") as file,
        tarfile.open(fileobj=file, mode="r|", tarinfo=_Header) as tar,
    ):
        for member in tar:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, kind = base.partition(".")
            if kind.lower() not in KINDS:
                raise ValueError(f"member {member.name} of {name}: only NAME.json and NAME.txt are read")
            if (folder, stem) != row_name:
                if row:
                    yield row
                row, row_name = {}, (folder, stem)
            if kind.lower() in row:
                raise ValueError(f"member {member.name} of {name} comes twice")
            if member.size > limit("row_mb") * MB:
                raise ValueError(str(too_large(f"member {member.name}", f"{member.size // MB} MB", "row_mb")))
            row[kind.lower()] = tar.extractfile(member).read().decode()
    if row:
        yield row

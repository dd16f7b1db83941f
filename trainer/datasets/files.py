"""Read data files of one format as rows by split. Errors name the file and the line."""

import glob
import os
from typing import TYPE_CHECKING

from trainer.datasets.rows import one_line
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def read_files(files: dict[str, list[str]], where: str) -> dict[str, "Dataset"]:
    """Read the rows of each split from its files. All files have one format."""
    names = [name for split in files.values() for name in split]
    kind = FORMATS.get(os.path.splitext(names[0])[1].lower())
    if kind is None:
        raise UserError(where, "unknown kind of file", ", ".join(FORMATS))
    patterns = {split: [glob.escape(os.path.abspath(name)) for name in names] for split, names in files.items()}
    try:
        splits = _read_kind(kind, patterns, names, where)
        for rows in splits.values():
            rows.data.validate(full=True)  # arrow accepts bytes that are not UTF-8 as text until they are read
    except UserError:
        raise
    except Exception as error:  # the reader's errors name neither file nor line: search for them here
        raise _explain(error, kind, names, where) from None
    return splits


def _read_kind(kind: str, patterns: dict[str, list[str]], names: list[str], where: str) -> dict[str, "Dataset"]:
    if kind == "json":
        from trainer.datasets.json_files import read_json_files

        return read_json_files(patterns)
    if kind == "csv":
        from trainer.datasets.csv_files import read_csv_files

        return read_csv_files(patterns, names, where)
    import datasets

    return datasets.load_dataset(kind, data_files=patterns)


def _explain(error: Exception, kind: str, names: list[str], where: str) -> UserError:
    from trainer.datasets.csv_files import find_csv_fault
    from trainer.datasets.json_faults import find_json_fault

    find_fault = {"json": find_json_fault, "csv": find_csv_fault}.get(kind)
    for name in names if find_fault else []:
        fault = find_fault(name)
        if fault:
            return _fault_error(where, name, *fault)
    causes = f"{one_line(error)} {one_line(error.__cause__)}"
    if "corresponds to no data" in causes or "No columns to parse" in causes:
        return UserError(where, "no rows")
    return UserError(where, f"cannot be read: {one_line(error.__cause__ or error)}")


def _fault_error(where: str, name: str, place: str, found: str) -> UserError:
    return UserError(f"{where} {place}" if where.endswith(name) else f"{where} {name} {place}", found)

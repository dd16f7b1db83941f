"""Read data files of one format as rows by split. Errors name the file and the line."""

import glob
import os

import datasets

from trainer.datasets.files.csv_files import read_csv_files
from trainer.datasets.files.input_checks import check_files
from trainer.datasets.files.json_files import read_json_files
from trainer.datasets.files.line_files import read_text_files
from trainer.datasets.files.read_faults import explain
from trainer.datasets.files.set_names import COMPRESSED, FORMATS, LINES, cure_of, kind_of_file
from trainer.errors import UserError


def read_files(files: dict[str, list[str]], where: str) -> dict[str, datasets.Dataset]:
    """Read the rows of each split from its files. All files have one format."""
    names = [name for split in files.values() for name in split]
    kinds = {kind_of_file(name) for name in names}
    if cure := next((cure for name in names if not kind_of_file(name) and (cure := cure_of(name))), None):
        raise UserError(where, "this kind of file is not read", instead=cure)
    if None in kinds or len(kinds) > 1:
        found = "unknown kind of file" if None in kinds else f"files of several kinds: {', '.join(sorted(kinds))}"
        allowed = f"{', '.join([*FORMATS, *LINES])}; {', '.join(COMPRESSED)} may follow .json and .jsonl"
        raise UserError(
            where, found, allowed if None in kinds else "one kind, or several sets with commas between them"
        )
    [kind] = kinds
    check_files([os.path.abspath(name) for name in names], where)
    patterns = {split: [glob.escape(os.path.abspath(name)) for name in names] for split, names in files.items()}
    try:
        splits = _read_kind(kind, patterns, names, where)
        for rows in splits.values():
            _validate_once(rows)
    except UserError:
        raise
    except Exception as error:  # the reader's errors name neither file nor line: search for them here
        plain = [name for name in names if not name.lower().endswith(COMPRESSED)]
        raise explain(error, kind, plain, where) from None
    return splits


def _validate_once(rows: datasets.Dataset) -> None:
    """Find bytes that are not UTF-8, which Arrow finds only when it reads them. An empty file marks checked rows."""
    folder = os.path.join(datasets.config.HF_DATASETS_CACHE, "trainer_validated")
    marker = os.path.join(folder, rows._fingerprint)
    if not os.path.exists(marker):
        rows.data.validate(full=True)
        os.makedirs(folder, exist_ok=True)
        open(marker, "w").close()


def _read_kind(kind: str, patterns: dict[str, list[str]], names: list[str], where: str) -> dict[str, datasets.Dataset]:
    if kind == "json":
        return read_json_files(patterns)
    if kind == "csv":
        return read_csv_files(patterns, names, where)
    if kind == "text":
        return read_text_files(patterns, names, where)
    return datasets.load_dataset(kind, data_files=patterns)

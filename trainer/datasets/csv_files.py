"""CSV files as rows of texts; a file whose rows do not fit its header is refused, by line."""

import csv
import sys
import warnings
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetDict


def read_csv_files(patterns: dict[str, list[str]], names: list[str], where: str) -> "DatasetDict":
    """The rows of the files of each split; patterns: the names for glob. All have the columns of the first file.

    Every column is text: types guessed from the values would make "007" a 7 and "NA" a missing value. Raises UserError
    for a header that names no columns, and whatever pandas raises: see `find_csv_fault`.
    """
    import pandas as pd

    columns = _columns(names, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of fields beyond the header, which it leaves out
            return _load(patterns, columns)
    except Exception:
        if not columns or any(map(find_csv_fault, names)):
            raise
    return _load(patterns, columns, usecols=columns)  # all such fields are empty: the rows end with a comma


def _load(patterns: dict[str, list[str]], columns: list[str], **options: Any) -> "DatasetDict":
    import datasets

    features = datasets.Features({column: datasets.Value("string") for column in columns}) if columns else None
    # index_col: else a row longer than the header makes row names of the first column, and shifts the others
    options |= {"features": features, "keep_default_na": False, "index_col": False}
    return datasets.load_dataset("csv", data_files=patterns, **options)


def _columns(names: list[str], where: str) -> list[str]:
    columns: list[str] = []
    for name in names:
        place = where if where.endswith(name) else f"{where} {name}"
        with open(name, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            header = next((row for row in reader if _is_row(row)), [])
        place += f" line {reader.line_num}"
        if any(not column.strip() for column in header):
            raise UserError(place, f"column {[c.strip() for c in header].index('') + 1} has no name", "one per column")
        twice = [column for column in header if header.count(column) > 1]
        if twice:
            raise UserError(place, f"two columns are named {twice[0]!r}", "different names")
        if columns and header and set(header) != set(columns):
            raise UserError(place, f"the columns {', '.join(header)}", f"as in {names[0]}: {', '.join(columns)}")
        columns = columns or header
    return columns


def _is_row(row: list[str]) -> bool:
    """Whether pandas does not skip it as a blank line."""
    return len(row) > 1 or bool(row and row[0].strip())


def find_csv_fault(path: str) -> tuple[str, str] | None:
    """(line, what is wrong there) of the first row with more fields than the header; empty ones at its end do not count."""
    csv.field_size_limit(sys.maxsize)  # a long text is no fault
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        num_columns, first_line = 0, 1
        for row in reader:
            if num_columns and any(row[num_columns:]):
                return f"line {first_line}", f"{len(row)} fields where the header has {num_columns}"
            num_columns = num_columns or (len(row) if _is_row(row) else 0)
            first_line = reader.line_num + 1
    return None

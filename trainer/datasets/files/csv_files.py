"""Read CSV files as rows of texts. If a row does not fit the header, the error names its line."""

import csv
import sys
import warnings
from typing import Any

import datasets
import pandas as pd

from trainer.datasets.files.input_checks import check_columns
from trainer.datasets.library import place_of_file
from trainer.errors import UserError
from trainer.metrics import counted

QUOTES = 'text behind the closing quote of a field; a field in quotes spells a quote as ""'
OTHER_MARKS = (";", "\t", "|")  # that some programs write between columns


def read_csv_files(patterns: dict[str, list[str]], names: list[str], where: str) -> datasets.DatasetDict:
    """Read the rows of each split from its CSV files.

    patterns: split -> glob patterns of its files. names: all file names. All files have the columns of the first one.
    Every column is text: types guessed from the values would make "007" a 7 and "NA" a missing value.

    Raises: UserError for a header that does not name the columns, and for a row that does not fit it.
    """
    columns = _columns(names, where)
    for name in names:
        if fault := find_csv_fault(name):
            raise UserError(f"{place_of_file(name, where)} {fault[0]}", fault[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # fields beyond the header, which pandas drops
            return _load(patterns, columns)
    except Exception:
        if not columns:
            raise
    return _load(patterns, columns, usecols=columns)  # the extra fields are all empty: the rows end with a comma


def _load(patterns: dict[str, list[str]], columns: list[str], **options: Any) -> datasets.DatasetDict:
    features = datasets.Features({column: datasets.Value("string") for column in columns}) if columns else None
    # Without index_col=False, a row longer than the header would shift its values: the first ones become row names.
    options |= {"features": features, "keep_default_na": False, "index_col": False}
    return datasets.load_dataset("csv", data_files=patterns, **options)


def _columns(names: list[str], where: str) -> list[str]:
    columns: list[str] = []
    for name in names:
        with open(name, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            header = next((row for row in reader if _is_row(row)), [])
        place = f"{place_of_file(name, where)} line {reader.line_num}"
        check_columns(len(header), place)
        if any(not column.strip() for column in header):
            raise UserError(place, f"column {[c.strip() for c in header].index('') + 1} has no name", "one per column")
        if len(header) == 1 and (other := next((mark for mark in OTHER_MARKS if mark in header[0]), None)):
            raise UserError(place, f"one column, whose name has {other!r}: {header[0]}", "commas between the columns")
        twice = [column for column in header if header.count(column) > 1]
        if twice:
            raise UserError(place, f"two columns are named {twice[0]!r}", "different names")
        if columns and header and set(header) != set(columns):
            raise UserError(place, f"columns {', '.join(header)}", f"the same as in {names[0]}: {', '.join(columns)}")
        columns = columns or header
    return columns


def _is_row(row: list[str]) -> bool:
    """Whether pandas reads the line as a row. It skips blank lines."""
    return len(row) > 1 or bool(row and row[0].strip())


def find_csv_fault(path: str) -> tuple[str, str] | None:
    """Find the first row with more or fewer fields than the header: (line, what is wrong there), or None.

    Empty fields beyond the header do not count. pandas would fill a row up with empty texts, without a word, and drop the
    quotes of a field that goes on behind its closing one.
    """
    csv.field_size_limit(sys.maxsize)  # a long text is not a fault
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, strict=True)
        num_columns, first_line = 0, 1
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                return f"line {first_line}", QUOTES if "expected after" in str(error) else str(error)
            if row is None:
                return None
            if num_columns and (any(row[num_columns:]) or (len(row) < num_columns and _is_row(row))):
                return f"line {first_line}", f"{counted(len(row), 'field')} where the header has {num_columns}"
            num_columns = num_columns or (len(row) if _is_row(row) else 0)
            first_line = reader.line_num + 1

"""Read values from a row. Every kind of training data uses these functions; `messages` reads conversations.

They raise UserError if a value has another type than its key needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import UserError

KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


class AsWritten(dict):
    """An object as it is in its file. Objects from Arrow have the keys of all rows, with None for missing values."""


def check_keys(columns: list[str], flag: str, keys: dict[str, str | None]) -> None:
    """Check that the dataset `flag` has all keys. Raises UserError that names the flag of a missing key."""
    for key_flag, key in keys.items():
        if key is not None and key not in columns:
            raise UserError(key_flag, f"no key {key!r} in the rows of {flag}", ", ".join(columns))


def kind_of(value: Any) -> str:
    """The kind of a value, for an error: "no value", "a number", "a list"."""
    return "no value" if value is None else f"a {KINDS.get(type(value), type(value).__name__)}"


def text_of(row: Any, key_flag: str, key: str) -> str:
    """The text under `key`, which the flag `key_flag` named. Raises UserError for any other value."""
    value = row[key]
    if not isinstance(value, str):
        raise UserError(f"{key_flag} {key}", kind_of(value), "a text")
    return value


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where`, such as a dataset and a row, in front of the place that a UserError names."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error.where}", error.found, error.allowed) from None

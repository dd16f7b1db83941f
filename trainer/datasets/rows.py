"""Read values from a row. Every kind of training data uses these functions; `messages` reads conversations.

They raise UserError if a value has another type than its key needs.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np

from trainer.errors import UserError

HALF = re.compile("[\ud800-\udfff]")  # one half of a character of UTF-16, which JSON can spell out alone


class AsWritten(dict):
    """An object as it is in its file. Objects from Arrow have the keys of all rows, with None for missing values."""


class Written(float):
    """A number of JSON whose text another file may write in another way: 1.50, 1e5, 1.0. `text` is as the file has it."""

    text: str


def written(text: str) -> float:
    """The number of a text, as `parse_float` of a JSON decoder."""
    value = float(text)
    if repr(value) == text and not value.is_integer() and "e" not in text:
        return value
    found = Written(value)
    found.text = text
    return found


KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    Written: "number",
    str: "string",
    list: "list",
    dict: "object",
}


class Twice(ValueError):
    """A key stands twice in one object of JSON. A reader of JSON would take the last value in silence."""


def unique(pairs: list[tuple[str, Any]], kind: type[dict] = dict) -> dict:
    """The object of these keys and values, as `object_pairs_hook` of a JSON decoder. Raises Twice."""
    found = kind(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=lambda pairs: unique(pairs, AsWritten), parse_float=written)


def json_text(text: str) -> Any:
    """The value of JSON that a text of a row holds. Raises ValueError if it is none, UserError for a key twice."""
    try:
        return DECODER.decode(text)
    except Twice as error:
        raise UserError("a text of JSON", str(error), "each key once") from None


def lookup(row: Any, key: str) -> Any:
    """The value of a column, or of a key inside it: `reward_model.ground_truth`. None if there is none.

    Raises: UserError if the key is inside a text, such as the JSON of an object.
    """
    if key in row:
        return row[key]
    head, _, rest = key.partition(".")
    inner = row.get(head) if rest else None
    if isinstance(inner, str):
        raise UserError(f"column {head}", f"a text, so it has no key {rest!r}", "an object")
    return lookup(inner, rest) if isinstance(inner, dict) else None


def column_of_key(columns: Iterable[str], key: str) -> str | None:
    """The column of a key, which may be inside an object: `reward_model`. None if no such column exists."""
    return next((name for name in (key, key.split(".")[0]) if name in columns), None)


def check_keys(columns: list[str], flag: str, keys: dict[str, str | None]) -> None:
    """Check that the dataset `flag` may have all keys. Raises UserError that names the flag of a missing key."""
    for key_flag, key in keys.items():
        if key is not None and not column_of_key(columns, key):
            raise UserError(key_flag, f"no key {key!r} in the rows of {flag}", ", ".join(columns))


def kind_of(value: Any) -> str:
    """The kind of a value, for an error: "no value", "a number", "a list"."""
    if value is None:
        return "no value"
    kind = next((name for kind, name in KINDS.items() if isinstance(value, kind)), type(value).__name__)
    return f"{'an' if kind == 'object' else 'a'} {kind}"


def narrow_columns(features: Any) -> tuple[str, ...]:
    """The columns of numbers with fewer than 64 bits, also inside objects (`a.b`). No features: none is known."""
    found: list[str] = []
    for name, feature in (features or {}).items():
        if isinstance(feature, dict):
            found += [f"{name}.{key}" for key in narrow_columns(feature)]
        elif getattr(feature, "dtype", None) in ("float16", "float32"):
            found.append(name)
    return tuple(found)


def text_value(value: Any, where: str, numbers: bool = False, narrow: bool = False) -> str:
    """A text. With `numbers`, also that of a number as its file has it. Raises UserError for another value.

    `narrow`: its column has fewer than 64 bits, so a number that they do not hold exactly has other digits now.
    """
    if isinstance(value, str):
        return value
    if numbers and isinstance(value, Written) and math.isfinite(value):
        return value.text
    if numbers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if numbers and isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"  # its column has this many digits
    if (
        numbers
        and isinstance(value, float)
        and math.isfinite(value)
        and not value.is_integer()
        and "e" not in repr(value)
        and not (narrow and _is_widened(value))
    ):
        return repr(value)
    if isinstance(value, dict):
        found = f"an object with the keys {', '.join(value)}"
        raise UserError(where, found, "a text; a.b names the key b of an object a")
    if numbers and isinstance(value, float):
        raise UserError(where, f"{value!r}, a number that the file may write in another way", "the number as a text")
    raise UserError(where, kind_of(value), "a text")


def _is_widened(value: float) -> bool:
    """Whether a number has the digits of a column of 32 bits that was read with 64: 0.1 became 0.10000000149011612."""
    short = str(np.float32(value))
    return float(np.float32(value)) == value and short != repr(value)


def truth_value(value: Any) -> bool | None:
    """A truth value: true or false, 1 or 0, also as a text of a CSV file in any case. None for another value."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def number_value(value: Any, where: str) -> float:
    """A finite number, also as a text of a CSV file. Raises UserError for another value."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, str)) else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(where, repr(value), "a number")
    return number


@contextmanager
def within(where: str) -> Iterator[None]:
    """Put `where`, such as a dataset and a row, in front of the place that a UserError names. A row may be too deep."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error.where}", error.found, error.allowed, error.instead) from None
    except RecursionError:
        raise UserError(where, "lists or objects are nested too deep", "fewer levels") from None

"""The label of a reward that no flag names: the places of reference answers whose meaning is sure. It imports no torch."""

import json
import os
from collections.abc import Collection, Iterable
from typing import Any

from trainer.comma_separated import names_in
from trainer.datasets.files.set_names import local_paths
from trainer.datasets.rows import column_of_key
from trainer.errors import UserError

# of verl, of SkyRL, of DAPO, of DeepMath. `answer` and `solution` may be worked solutions, so a flag must name them
REFERENCES = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "final_answer")
LINES = (".jsonl", ".ndjson")
ROW_BYTES = 1 << 20  # a longer first row is not read early


def reference_of(row: Any, flag: str, ignored: Collection[str] = ()) -> str:
    """The place of the label in the first row of the set `flag`. Raises UserError for none, and for several."""
    found = _references_in(row, ignored)
    if len(found) > 1:
        raise UserError("--label_key", f"missing, and {' and '.join(found)} are labels of {flag}", "one of them")
    if not found:
        others = ", ".join(name for name in row if name not in ignored)
        raise UserError("--label_key", f"missing: the reward compares responses with the labels of {flag}", others)
    return found[0]


def possible_reference(row: Any, ignored: Collection[str], taken: Collection[str]) -> str | None:
    """The place of the label for rewards that may take one. None for none, for several, and for a column in `taken`."""
    found = _references_in(row, ignored)
    return found[0] if len(found) == 1 and column_of_key(row, found[0]) not in taken else None


def lack_references(names: str | None) -> bool:
    """Whether no set of a flag has such a place in its first row. False if a set is no file of JSON lines."""
    paths = [path for name in names_in(names) for path in local_paths(name)[0][:1]]
    rows = [_first_row(path) for path in paths]
    return bool(rows) and all(row is not None and not _references_in(row) for row in rows)


def _references_in(row: Any, ignored: Iterable[str] = ()) -> list[str]:
    known = {name: value for name, value in row.items() if name not in ignored}
    return [key for key in REFERENCES if column_of_key(known, key) and _value(known, key) is not None]


def _value(row: dict[str, Any], key: str) -> Any:
    """The value of a key. That of an object whose JSON is a text is none."""
    head, _, rest = key.partition(".")
    inner = row[head] if rest else {"": row[key]}
    return inner.get(rest) if isinstance(inner, dict) else None


def _first_row(path: str) -> dict | None:
    """The first row of a file of JSON lines. None for another file, or for what the reader of the set must name."""
    if not path.lower().endswith(LINES) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            row = json.loads(file.readline(ROW_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None

"""Refusals of pairs whose answers, or which of them is better, another column puts in doubt."""

from typing import Any

from trainer.datasets.conversations.messages import IGNORE
from trainer.datasets.rows import lookup, truth_value
from trainer.datasets.shapes.columns import CHOSEN, EMPTY, REJECTED, VERDICTS, Columns, plain_name
from trainer.errors import UserError

UNDECIDED = ("tie", "istie", "swapped", "isswapped", "flipped", "isflipped")  # true: chosen may not be better
WINNERS = ("preference", "preferred", "winner", "better", "choice")  # one may name the rejected answer


def refuse_doubtful_pair(columns: Columns, keys: list[str | None]) -> None:
    """Raise UserError if other columns contradict the answers under `keys`, or if these only name texts of other columns."""
    _refuse_other_answers(columns, keys)
    values = [lookup(columns.row, key) for key in keys if key]
    if len(values) == 2 and all(type(value) in (int, str) for value in values):
        _refuse_places(columns, keys, [str(value).strip() for value in values])
    for name, value in _others(columns).items():
        plain, truth = plain_name(name), truth_value(value)
        is_against = (plain in VERDICTS and truth is False) or (plain in UNDECIDED and truth is True)
        if is_against or (plain in WINNERS and str(value).strip().lower() == "rejected"):
            found = f"{value!r} may say that the chosen answer is not the better one, and is not used here"
            raise UserError(f"column {name}", found, f"rows whose chosen answer is better, or {IGNORE} {name}")


def _others(columns: Columns) -> dict[str, Any]:
    """The columns that nothing has read."""
    return {name: value for name, value in columns.row.items() if name not in columns.used | columns.taken}


def _refuse_other_answers(columns: Columns, keys: list[str | None]) -> None:
    """Another known name of the same answer, with another value."""
    others = _others(columns)
    for key, names in zip(keys, (CHOSEN, REJECTED)):
        for name in names if key in names else ():
            if name in others and others[name] not in EMPTY and others[name] != columns.row[key]:
                raise UserError(f"columns {key} and {name}", "each could be meant", f"{IGNORE} with one of them")


def _refuse_places(columns: Columns, keys: list[str | None], texts: list[str]) -> None:
    """Answers that may be places in a list of another column, or the ends of the names of two columns."""
    where, others = f"columns {' and '.join(map(str, keys))}", _others(columns)
    for name, value in others.items():
        is_list = isinstance(value, list) and all(isinstance(item, (str, list, dict)) for item in value)
        if is_list and all(text.isdecimal() and int(text) <= len(value) for text in texts):
            found = f"numbers, which may be places in column {name}"
            raise UserError(where, found, f"the answers as texts, or {IGNORE} {name}")
    named = [{name.lower().removesuffix(t.lower()): name for name in others if t and name.lower().endswith(t.lower())} for t in texts]  # fmt: skip
    if shared := [stem for stem in named[0] if stem in named[1] and texts[0] != texts[1]]:
        found = f"{texts[0]!r} and {texts[1]!r}, which may name columns {named[0][shared[0]]} and {named[1][shared[0]]}"
        raise UserError(where, found, f"the answers as texts, or {IGNORE} with these columns")

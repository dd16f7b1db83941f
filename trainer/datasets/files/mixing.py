"""Join several sets into one dataset. Columns get common types. Rows follow each other, or are sampled with odds."""

import functools
from typing import Any

from datasets import Dataset, Json, LargeList, List, Value, concatenate_datasets, interleave_datasets

from trainer.datasets.files.json_files import JsonNumber, JsonText, as_json
from trainer.errors import UserError

NUMBERS = ("numbers", "int64", "float64")


def mix(sets: list[Dataset], paths: list[str], flag: str, odds: list[float] | None, seed: int) -> Dataset:
    """Join several sets into one dataset; see `load_rows`."""
    return joined(_with_common_types(sets, paths, flag), odds, seed)


def joined(sets: list, odds: list[float] | None, seed: int):
    """Datasets or streams of the same columns as one: they follow each other, or each next row is sampled with `odds`.

    With odds, it ends when the first set is used up: every row occurs at most once, and the odds hold to the end.
    """
    if odds is None:
        return concatenate_datasets(sets)
    return interleave_datasets(sets, probabilities=odds, seed=seed, stopping_strategy="first_exhausted")


def without_types(sets: list[Dataset]) -> list[Dataset]:
    """The sets, with any JSON values in the columns that have no common type. Bytes stay as they are."""
    for column in sorted({column for rows in sets for column in rows.column_names}):
        kinds = [rows.features[column] for rows in sets if column in rows.column_names]
        if functools.reduce(lambda one, other: one and _common_type(one, other), kinds) is None:
            sets = [as_json(rows, column) if column in rows.column_names else rows for rows in sets]
    return sets


def _with_common_types(sets: list[Dataset], paths: list[str], flag: str) -> list[Dataset]:
    """Give each column one type in all sets. Texts of any Arrow width are one type. Objects may have different keys."""
    for column in sorted({column for rows in sets for column in rows.column_names}):
        holders = [i for i, rows in enumerate(sets) if column in rows.column_names]
        first = sets[holders[0]].features[column]
        for i in holders[1:]:
            other = sets[i].features[column]
            common = _common_type(first, other)
            if common is None:
                kinds = f"{_describe(first)} in {paths[holders[0]]}, {_describe(other)} in {paths[i]}"
                allowed = "one type per column; a list of sets in a file of --config reads each set by itself"
                raise UserError(flag, f"column {column!r} is {kinds}", allowed)
            first = common
        for i in holders:
            if sets[i].features[column] != first:
                sets[i] = sets[i].cast_column(column, first)
    return sets


def _common_type(a: Any, b: Any) -> Any:
    """The column type that holds the values of both types unchanged, or None."""
    if a == b or b == Value("null"):
        return a
    if a == Value("null"):
        return b
    texts = (Value("string"), Value("large_string"))
    if a in texts and b in texts:
        return Value("string")
    if isinstance(a, JsonNumber) or isinstance(b, JsonNumber):
        return JsonNumber() if _describe(a) in NUMBERS and _describe(b) in NUMBERS else None
    nested = (List, LargeList, dict, Json)
    if isinstance(a, nested) and isinstance(b, nested) and any(isinstance(feature, JsonText) for feature in (a, b)):
        return JsonText()  # it holds both lists and objects
    if isinstance(a, (List, LargeList)) and isinstance(b, (List, LargeList)):
        inner = _common_type(a.feature, b.feature)
        return inner if inner is None or isinstance(inner, JsonText) else List(inner)
    if isinstance(a, (dict, Json)) and isinstance(b, (dict, Json)):
        return JsonText()
    return None


def _describe(feature: Any) -> str:
    if isinstance(feature, JsonNumber):
        return "numbers"
    if isinstance(feature, JsonText):
        return "lists or objects"
    if isinstance(feature, (List, LargeList)):
        return f"list of {_describe(feature.feature)}"
    return feature.dtype if isinstance(feature, Value) else "object" if isinstance(feature, dict) else str(feature)

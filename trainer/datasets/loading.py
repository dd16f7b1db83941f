"""Rows from files, folders and the hub, mixed into one dataset; what is wrong with a file is told by file and line."""

import csv
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
# The JSON reader fixes the columns by its first chunk, so a key that first appears later is an error: look far ahead.
JSON_CHUNK_BYTES = 64 << 20


def load_rows(
    names: str,
    *,
    flag: str,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
) -> "Dataset":
    """The rows of one or several sets, as one dataset.

    names: comma separated; each a .json, .jsonl, .parquet, .csv or .arrow file, a folder of them, a folder written by
    `save_to_disk`, or a name on the hub. max_samples: at most that many first rows of each set. A lone file has the one
    split "train". All values of a CSV file are texts as written ("007", "NA" and "" stay what they are).

    Without probs, several sets follow each other. With probs (one per set, any positive scale) the next row comes from
    a set drawn with these odds, until the first set is used up: no row occurs twice and the odds hold to the end.
    Where sets have different columns, a row has None under the columns of the others.

    Raises UserError, naming the flag and the file, for whatever cannot be read.
    """
    paths = [name.strip() for name in names.split(",") if name.strip()]
    if not paths:
        raise UserError(flag, "names no dataset", "a file, a folder or a hub name; several with commas")
    if max_samples is not None and max_samples < 1:
        raise UserError("--max_samples", str(max_samples), "at least 1")
    odds = _parse_probs(probs, len(paths))
    with quiet():
        sets = [_load_set(path, flag, split) for path in paths]
        if max_samples is not None:
            sets = [rows.select(range(min(max_samples, len(rows)))) for rows in sets]
        return _mix(sets, paths, flag, odds, seed)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bar and no log line of the datasets library inside: what is wrong is told once, by our own error."""
    import datasets

    had_bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def _parse_probs(probs: str | None, num_sets: int) -> list[float] | None:
    if probs is None:
        return None
    try:
        odds = [float(part) for part in probs.split(",")]
    except ValueError:
        raise UserError("--dataset_probs", probs, "numbers with commas between them") from None
    if len(odds) != num_sets:
        raise UserError("--dataset_probs", f"{len(odds)} numbers for {num_sets} datasets", "one number per dataset")
    if not all(math.isfinite(p) and p > 0 for p in odds):
        raise UserError("--dataset_probs", probs, "numbers above 0")
    return [p / sum(odds) for p in odds]


def _mix(sets: list["Dataset"], paths: list[str], flag: str, odds: list[float] | None, seed: int) -> "Dataset":
    import datasets

    if len(sets) == 1:
        return sets[0]
    sets = _with_common_types(sets, paths, flag)
    if odds is None:
        return datasets.concatenate_datasets(sets)
    # until the first set is used up: every row at most once, and the proportions hold to the end
    return datasets.interleave_datasets(sets, probabilities=odds, seed=seed, stopping_strategy="first_exhausted")


def _with_common_types(sets: list["Dataset"], paths: list[str], flag: str) -> list["Dataset"]:
    """The sets with one type per column: text is text whatever its arrow width, objects may have different keys."""
    for column in sorted({column for rows in sets for column in rows.column_names}):
        holders = [i for i, rows in enumerate(sets) if column in rows.column_names]
        first = sets[holders[0]].features[column]
        for i in holders[1:]:
            other = sets[i].features[column]
            common = _common_type(first, other)
            if common is None:
                found = (
                    f"column {column!r} is {_describe(first)} in {paths[holders[0]]}, {_describe(other)} in {paths[i]}"
                )
                raise UserError(flag, found, "one type per column")
            first = common
        for i in holders:
            if sets[i].features[column] != first:
                sets[i] = sets[i].cast_column(column, first)
    return sets


def _common_type(a: Any, b: Any) -> Any:
    """The column type that holds the values of both unchanged, or None."""
    from datasets import Json, LargeList, List, Value

    if a == b or b == Value("null"):
        return a
    if a == Value("null"):
        return b
    texts = (Value("string"), Value("large_string"))
    if a in texts and b in texts:
        return Value("string")
    if isinstance(a, (List, LargeList)) and isinstance(b, (List, LargeList)):
        inner = _common_type(a.feature, b.feature)
        return None if inner is None else List(inner)
    if isinstance(a, (dict, Json)) and isinstance(b, (dict, Json)):
        return Json()
    return None


def _describe(feature: Any) -> str:
    from datasets import LargeList, List, Value

    if isinstance(feature, (List, LargeList)):
        return f"list of {_describe(feature.feature)}"
    return feature.dtype if isinstance(feature, Value) else "object" if isinstance(feature, dict) else str(feature)


def _load_set(path: str, flag: str, split: str) -> "Dataset":
    where = f"{flag} {path}"
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        splits = _read_folder(local, where)
    elif os.path.isfile(local):
        splits = _read_files({"train": [local]}, where)
    else:
        splits = _read_hub(path, where)
    if split not in splits:
        raise UserError(where, f"no split {split!r}", ", ".join(splits))
    if len(splits[split]) == 0:
        raise UserError(where, "no rows")
    return splits[split]


def _read_folder(folder: str, where: str) -> dict[str, "Dataset"]:
    import datasets

    try:
        if os.path.exists(os.path.join(folder, "dataset_dict.json")):
            return datasets.load_from_disk(folder)
        if os.path.exists(os.path.join(folder, "state.json")):
            rows = datasets.load_from_disk(folder)
            return {str(rows.split or "train"): rows}
        files = datasets.load_dataset_builder(folder).config.data_files
    except FileNotFoundError:
        raise UserError(where, "no data files in this folder", ", ".join(FORMATS)) from None
    except Exception as error:  # whatever the library raises is about this folder
        raise UserError(where, f"cannot be read: {_one_line(error)}") from None
    return _read_files({str(split): list(names) for split, names in files.items()}, where)


def _read_files(files: dict[str, list[str]], where: str) -> dict[str, "Dataset"]:
    import datasets

    names = [name for split in files.values() for name in split]
    kind = FORMATS.get(os.path.splitext(names[0])[1].lower())
    if kind is None:
        raise UserError(where, "unknown kind of file", ", ".join(FORMATS))
    options = {"json": _json_options, "csv": _csv_options}.get(kind, lambda _: {})(names)
    try:
        splits = datasets.load_dataset(kind, data_files=files, **options)
        for rows in splits.values():
            rows.data.validate(full=True)  # arrow takes bytes that are no UTF-8 for text until somebody reads them
    except Exception as error:  # the reader's errors name neither file nor line: look ourselves
        raise _explain(error, names if kind == "json" else [], where) from None
    for split, rows in splits.items():
        if kind == "json" and any(isinstance(feature, datasets.Json) for feature in rows.features.values()):
            _refuse_mixed_columns(files[split], where)
    return splits


def _json_options(_: list[str]) -> dict[str, Any]:
    # Rows that happen to look like logs of coding agents would otherwise be turned into other columns.
    return {"chunksize": JSON_CHUNK_BYTES, "parse_agent_traces": False}


def _csv_options(names: list[str]) -> dict[str, Any]:
    """Every column is text: types guessed from the values would make "007" a 7 and "NA" a missing value."""
    from datasets import Features, Value

    with open(names[0], encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
    return {
        "features": Features({name: Value("string") for name in header}) if header else None,
        "keep_default_na": False,
    }


def _read_hub(name: str, where: str) -> dict[str, "Dataset"]:
    import datasets

    if os.path.splitext(name)[1].lower() in FORMATS or not HUB_NAME.fullmatch(name):
        raise UserError(where, "file not found")
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # absent, private, offline, several configurations: its words tell
        raise UserError(where, f"no such file or folder, and not to be had from the hub: {_one_line(error)}") from None


def _explain(error: Exception, json_files: list[str], where: str) -> UserError:
    from trainer.datasets.json_faults import find_json_fault

    for name in json_files:
        fault = find_json_fault(name)
        if fault:
            return _fault_error(where, name, *fault)
    causes = f"{_one_line(error)} {_one_line(error.__cause__)}"
    if isinstance(error, StopIteration) or "corresponds to no data" in causes or "No columns to parse" in causes:
        return UserError(where, "no rows")
    return UserError(where, f"cannot be read: {_one_line(error.__cause__ or error)}")


def _refuse_mixed_columns(files: list[str], where: str) -> None:
    """The reader lets a column hold texts here and numbers there; no training key may."""
    from trainer.datasets.json_faults import find_json_fault

    for name in files:
        fault = find_json_fault(name, nested=False)
        if fault:
            raise _fault_error(where, name, *fault)


def _fault_error(where: str, name: str, place: str, found: str) -> UserError:
    return UserError(f"{where} {place}" if where.endswith(name) else f"{where} {name} {place}", found)


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300] if error else ""

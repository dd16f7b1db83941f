"""Rows from files, folders and the hub, mixed into one dataset; what is wrong with a file is told by file and line."""

import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


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
    odds = None
    if probs is not None:
        from trainer.datasets.mixing import parse_probs

        odds = parse_probs(probs, len(paths))
    with quiet():
        sets = [_load_set(path, flag, split) for path in paths]
        if max_samples is not None:
            sets = [rows.select(range(min(max_samples, len(rows)))) for rows in sets]
        if len(sets) == 1:
            return sets[0]
        from trainer.datasets.mixing import mix

        return mix(sets, paths, flag, odds, seed)


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


def _load_set(path: str, flag: str, split: str) -> "Dataset":
    where = f"{flag} {path}"
    local = os.path.expanduser(path)
    if "::" in local and os.path.exists(local):
        raise UserError(where, "a name with '::' is an archive to the datasets library", "a name without")
    if os.path.isdir(local):
        from trainer.datasets.folders import read_folder

        splits = read_folder(local, where)
    elif os.path.isfile(local):
        splits = read_files({"train": [local]}, where)
    else:
        splits = _read_hub(path, where)
    if split not in splits:
        raise UserError(where, f"no split {split!r}", ", ".join(splits))
    if len(splits[split]) == 0:
        raise UserError(where, "no rows")
    return splits[split]


def read_files(files: dict[str, list[str]], where: str) -> dict[str, "Dataset"]:
    """The rows of each split from its files, all of one format."""
    names = [name for split in files.values() for name in split]
    kind = FORMATS.get(os.path.splitext(names[0])[1].lower())
    if kind is None:
        raise UserError(where, "unknown kind of file", ", ".join(FORMATS))
    patterns = {split: [glob.escape(os.path.abspath(name)) for name in names] for split, names in files.items()}
    try:
        splits = _read_kind(kind, patterns, names, where)
        for rows in splits.values():
            rows.data.validate(full=True)  # arrow takes bytes that are no UTF-8 for text until somebody reads them
    except UserError:
        raise
    except Exception as error:  # the reader's errors name neither file nor line: look ourselves
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


def _read_hub(name: str, where: str) -> dict[str, "Dataset"]:
    import datasets

    if os.path.splitext(name)[1].lower() in FORMATS or not HUB_NAME.fullmatch(name):
        raise UserError(where, "file not found")
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # absent, private, offline, several configurations: its words tell
        raise UserError(where, f"no such file or folder, and not to be had from the hub: {one_line(error)}") from None


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


def one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300] if error else ""

"""Rows from files, folders and the hub, mixed into one dataset."""

import os
from collections.abc import Collection, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from trainer.datasets.files.folders import files_of_folder, read_folder
from trainer.datasets.files.image_files import COLUMN, FOLDER, SINGLE, has_images
from trainer.datasets.files.mixing import joined, mix
from trainer.datasets.files.read_files import read_files
from trainer.datasets.files.set_names import hub_name, local_paths, names_of_sets
from trainer.datasets.library import one_line, quiet
from trainer.datasets.text_flags import parse_probs
from trainer.errors import UserError
from trainer.flags.names.own_flags import MAX_SAMPLES, SPLIT


def load_rows(
    names: str,
    *,
    flag: str,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    ignored: Collection[str] = (),
) -> datasets.Dataset:
    """Load one or several sets and return their rows as one dataset.

    names: separated by commas. Each is a file (.json, .jsonl, .parquet, .csv, .arrow or .txt), a pattern of files such
    as data/*.jsonl, a folder of files, a folder written by `save_to_disk`, or a hub name, also with a configuration
    (org/name:config). Files have one split, "train". A number after # takes only so many first rows: data.jsonl#500.
    max_samples: use only this many first rows of each set. ignored: columns to leave out. CSV values stay texts as written: "007", "NA" and "".

    Without probs, several sets follow each other. With probs (one per set, any positive scale), each next row comes
    from a set sampled with these odds. The dataset ends when the first set is used up: no row occurs twice, and the
    odds hold to the end. A row has None in the columns that only other sets have.

    Raises: UserError for anything that cannot be read. It names the flag and the file.
    """
    paths = names_of_sets(names, flag)
    odds = None if probs is None else parse_probs(probs, len(paths))
    with quiet():
        sets = _load_sets(paths, flag, split, max_samples, ignored)
        return sets[0] if len(sets) == 1 else mix(sets, paths, flag, odds, seed)


def place_of_row(
    index: int, names: str, *, flag: str, split: str, own: Sequence[dict[str, Any]] = (), **order: Any
) -> str | None:
    """ "FILE row NUMBER" for a row of `places_of_rows` with these arguments, or None if the rows are those of one file."""
    paths, places = places_of_rows(names, flag=flag, split=split, own=own, **order)
    with quiet():
        number, index = places[index]["set"], places[index]["row"]
        split = own[number].get(SPLIT, split) if own else split
        files = _files_of(paths[number], split) or [paths[number]]
        for path in files:
            size = len(read_files({split: [path]}, f"{flag} {path}")[split]) if len(files) > 1 else index + 1
            if index < size:
                break
            index -= size
    return f"{path} row {index + 1}" if len(paths) > 1 or len(files) > 1 else None


def places_of_rows(
    names: str,
    *,
    flag: str,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    own: Sequence[dict[str, Any]] = (),
) -> tuple[list[str], datasets.Dataset]:
    """The names of the sets, and for each row the columns `set` and `row`: its set, its index there.

    The order is that of `load_rows`. `own`: for each set its own flags, in which `split` and `max_samples` count.
    """
    paths = names_of_sets(names, flag)
    odds = None if probs is None else parse_probs(probs, len(paths))
    with quiet():
        sizes = map(len, _load_sets(paths, flag, split, max_samples, own=own))
        counted = [{"set": np.full(size, number), "row": np.arange(size)} for number, size in enumerate(sizes)]
        return paths, joined([datasets.Dataset.from_dict(columns) for columns in counted], odds, seed)


def columns_of_sets(names: str, flag: str, split: str, own: Sequence[dict[str, Any]] = ()) -> set[str]:
    """The names of all columns of the sets. `own`: for each set its own flags, in which `split` counts."""
    with quiet():
        sets = _load_sets(names_of_sets(names, flag), flag, split, None, own=own)
    return {name for rows in sets for name in rows.column_names}


def _load_sets(
    paths: list[str],
    flag: str,
    split: str,
    max_samples: int | None,
    ignored: Collection[str] = (),
    own: Sequence[dict[str, Any]] = (),
) -> list[datasets.Dataset]:
    if max_samples is not None and max_samples < 1:
        raise UserError("--max_samples", str(max_samples), "at least 1")
    sets = []
    for path, flags in zip(paths, own or [{}] * len(paths), strict=True):
        rows, most = _load_set(path, flag, flags.get(SPLIT, split), ignored), flags.get(MAX_SAMPLES, max_samples)
        sets.append(rows if most is None else rows.select(range(min(most, len(rows)))))
    return sets


def _files_of(path: str, split: str) -> list[str]:
    """The files of a set in the order of their rows. A set that is no set of files has none."""
    paths, _ = local_paths(path)
    if not paths or not os.path.isdir(paths[0]):
        return paths
    return (files_of_folder(paths[0], path) or {}).get(split, [])


def _load_set(path: str, flag: str, split: str, ignored: Collection[str]) -> datasets.Dataset:
    where = f"{flag} {path}"
    paths, num_rows = local_paths(path)
    if paths and "::" in paths[0]:
        raise UserError(where, "the datasets library reads a name with '::' as an archive", "a name without '::'")
    if paths and os.path.isdir(paths[0]):
        splits = read_folder(paths[0], where)
    elif paths:
        splits = read_files({"train": paths}, where)
    else:
        splits = _read_hub(path if num_rows is None else path.rpartition("#")[0], where)
    if split not in splits:
        raise UserError(where, f"no split {split!r}", ", ".join(splits))
    rows = splits[split]
    if len(rows) == 0:
        raise UserError(where, "no rows")
    if num_rows is not None:
        rows = rows.select(range(min(num_rows, len(rows))))
    rows = _without_empty(_with_one_name(rows.remove_columns([name for name in rows.column_names if name in ignored])))
    return _with_folder(rows, paths[0]) if paths and has_images(rows) else rows


def _with_one_name(rows: Dataset) -> Dataset:
    """The rows with the column `image` (one for each row, as in many public sets) as `images`."""
    return rows if has_images(rows) or SINGLE not in rows.column_names else rows.rename_column(SINGLE, COLUMN)


def _without_empty(rows: Dataset) -> Dataset:
    """The rows without a column of images that is empty in all of them: such rows are texts, for any model."""
    return rows.remove_columns(COLUMN) if has_images(rows) and _is_empty(rows.data.column(COLUMN)) else rows


def _is_empty(column: Any) -> bool:
    kind = column.type
    if pa.types.is_null(kind) or column.null_count == len(column):
        return True
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return not pc.sum(pc.list_value_length(column)).as_py()
    is_short = pa.types.is_string(kind) and pc.max(pc.binary_length(column)).as_py() <= len("[]")
    return is_short and set(pc.unique(column).to_pylist()) <= {None, "", "[]"}


def _with_folder(rows: Dataset, path: str) -> Dataset:
    """The rows with a column for the folder where relative paths begin: the data's folder, or its file's."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    if FOLDER in rows.column_names:
        raise UserError(path, f"a column {FOLDER} beside {COLUMN}", f"rows without {FOLDER}, which is our own name")
    return rows.add_column(FOLDER, [os.path.abspath(folder)] * len(rows)) if os.path.exists(path) else rows


def _read_hub(name: str, where: str) -> dict[str, datasets.Dataset]:
    """The splits of a dataset on the hub. Raises UserError if the hub does not give it."""
    found = hub_name(name)
    if not found:
        raise UserError(where, "file not found")
    try:
        return datasets.load_dataset(found["name"], found["config"])
    except Exception as error:  # absent, private, offline or several configurations: the library's message says which
        raise UserError(where, f"no such file or folder, and the hub does not give it: {one_line(error)}") from None

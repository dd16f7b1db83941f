"""Rows from files, folders and the hub, mixed into one dataset."""

import os
import re

import datasets

from trainer.datasets.files.folders import read_folder
from trainer.datasets.files.image_files import has_images, with_folder
from trainer.datasets.files.mixing import mix, parse_probs
from trainer.datasets.files.read_files import FORMATS, read_files
from trainer.datasets.library import one_line, quiet
from trainer.errors import UserError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load_rows(
    names: str,
    *,
    flag: str,
    split: str,
    probs: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
) -> datasets.Dataset:
    """Load one or several sets and return their rows as one dataset.

    names: separated by commas. Each is a file (.json, .jsonl, .parquet, .csv or .arrow), a folder of files, a folder
    written by `save_to_disk`, or a hub name. A single file has one split, "train".
    max_samples: use only this many first rows of each set. CSV values stay texts as written: "007", "NA" and "".

    Without probs, several sets follow each other. With probs (one per set, any positive scale), each next row comes
    from a set sampled with these odds. The dataset ends when the first set is used up: no row occurs twice, and the
    odds hold to the end. A row has None in the columns that only other sets have.

    Raises: UserError for anything that cannot be read. It names the flag and the file.
    """
    paths = [name.strip() for name in names.split(",") if name.strip()]
    if not paths:
        raise UserError(flag, "names no dataset", "files, folders or hub names with commas between them")
    if max_samples is not None and max_samples < 1:
        raise UserError("--max_samples", str(max_samples), "at least 1")
    odds = None if probs is None else parse_probs(probs, len(paths))
    with quiet():
        sets = [_load_set(path, flag, split) for path in paths]
        if max_samples is not None:
            sets = [rows.select(range(min(max_samples, len(rows)))) for rows in sets]
        return sets[0] if len(sets) == 1 else mix(sets, paths, flag, odds, seed)


def _load_set(path: str, flag: str, split: str) -> datasets.Dataset:
    where = f"{flag} {path}"
    local = os.path.expanduser(path)
    if "::" in local and os.path.exists(local):
        raise UserError(where, "the datasets library reads a name with '::' as an archive", "a name without '::'")
    if os.path.isdir(local):
        splits = read_folder(local, where)
    elif os.path.isfile(local):
        splits = read_files({"train": [local]}, where)
    else:
        splits = _read_hub(path, where)
    if split not in splits:
        raise UserError(where, f"no split {split!r}", ", ".join(splits))
    if len(splits[split]) == 0:
        raise UserError(where, "no rows")
    return with_folder(splits[split], local) if has_images(splits[split]) else splits[split]


def _read_hub(name: str, where: str) -> dict[str, datasets.Dataset]:
    """The splits of a dataset on the hub. Raises UserError if the hub does not give it."""
    if os.path.splitext(name)[1].lower() in FORMATS or not HUB_NAME.fullmatch(name):
        raise UserError(where, "file not found")
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # absent, private, offline or several configurations: the library's message says which
        raise UserError(where, f"no such file or folder, and the hub does not give it: {one_line(error)}") from None

"""The names of data sets, as flags have them: which are files, and which may be names on the hub. No library is used."""

import glob
import os
import re

from trainer.comma_separated import names_in
from trainer.errors import UserError

FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")  # after .json and .jsonl
LINES = {".txt": "text"}  # each line is a row with the column `text`; only if the file is named, not in a folder
# how to write other kinds of files
TO_JSONL = "to_json('FILE.jsonl', orient='records', lines=True)"
CURES = {
    ".tsv": f"Write its rows as .jsonl: python -c \"import pandas as pd; pd.read_csv('FILE.tsv', sep='\\t', dtype=str, keep_default_na=False).{TO_JSONL}\"",
    ".xlsx": f"Write its rows as .jsonl: python -c \"import pandas as pd; pd.read_excel('FILE.xlsx', dtype=str, keep_default_na=False).{TO_JSONL}\"",
    ".json5": "Write it as JSON: python -c \"import json, json5; json.dump(json5.load(open('FILE.json5')), open('FILE.json', 'w'))\"",
}
CURES |= dict.fromkeys(COMPRESSED, "Unpack it first: only .json and .jsonl are read packed")
HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<config>[\w.-]+))?")
FIRST_ROWS = re.compile(r"(?P<path>.+)#(?P<rows>[1-9]\d*)")  # data.jsonl#500


def names_of_sets(names: str, flag: str) -> list[str]:
    """The names between the commas of a flag. Raises UserError if there is none."""
    paths = names_in(names)
    if not paths:
        raise UserError(flag, "names no dataset", "files, folders or hub names with commas between them")
    return paths


def check_files(names: str | None, flag: str) -> None:
    """Raise UserError for a comma-separated name that is neither there nor a name on the hub, or for an empty file."""
    for name in names_of_sets(names, flag) if names is not None else ():
        paths, num_rows = local_paths(name)
        if not paths and hub_name(name if num_rows is None else name.rpartition("#")[0]) is None:
            is_there = "#" in name and local_paths(name.partition("#")[0])[0]
            raise UserError(
                f"{flag} {name}", "file not found", "after #, a whole number of rows above 0" * bool(is_there)
            )
        if len(paths) == 1 and os.path.isfile(paths[0]) and not os.path.getsize(paths[0]):
            raise UserError(f"{flag} {name}", "no rows")


def names_on_hub(names: str | None) -> list[str]:
    """The names of repositories among comma-separated names, each once: what is not here and may be on the hub."""
    absent = [name for name in names_in(names) if not local_paths(name)[0]]
    found = [hub_name(name.rpartition("#")[0] if FIRST_ROWS.fullmatch(name) else name) for name in absent]
    return list(dict.fromkeys(one["name"] for one in found if one))


def local_paths(name: str) -> tuple[list[str], int | None]:
    """The files of a set, or its folder, and the number of rows to take. No path: it is not on this machine."""
    path, first = os.path.expanduser(name), None
    if not os.path.exists(path) and (first := FIRST_ROWS.fullmatch(path)):
        path = first["path"]
    paths = [path] if os.path.exists(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    return paths, first and int(first["rows"])


def cure_of(name: str) -> str:
    """How to write a file of an unknown kind as one that is read, or ""."""
    return CURES.get(os.path.splitext(name.lower())[1], "")


def hub_name(name: str) -> re.Match | None:
    """The parts `name` and `config` of what the hub might have, or None."""
    return None if kind_of_file(name) else HUB_NAME.fullmatch(name)


def kind_of_file(name: str) -> str | None:
    """The reader of a file by its name, or None."""
    stem, end = os.path.splitext(name.lower())
    if end in COMPRESSED:
        kind = FORMATS.get(os.path.splitext(stem)[1])
        return kind if kind == "json" else None
    return (FORMATS | LINES).get(end)

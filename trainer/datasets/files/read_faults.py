"""Find the line of a data file that could not be read. This is used only after a reader has failed."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import datasets

from trainer.datasets.files.json_files import DECODER, Wrapped, is_array
from trainer.datasets.library import one_line, place_of_file
from trainer.datasets.rows import HALF, KINDS, Twice
from trainer.errors import UserError

TEXTS = ("csv", "text")
NOT_UTF8 = "not UTF-8 text"
OBJECTS = 'one object in each line, such as {"messages": [...]}, or one array of objects'
CURES = {
    NOT_UTF8: "UTF-8, as iconv -t UTF-8 writes it",
    "not an object with keys": OBJECTS,
    "broken JSON": OBJECTS,
    " here but a ": "values of one kind in a column; or two files, named in a list under dataset: in a file of --config",
    " twice in one object": "each key once",
    "one half of a character": "whole characters",
}
# how files begin that a wrong name gives to a reader of texts
MAGIC = {
    b"PAR1": ("a Parquet file", "a name that ends in .parquet"),
    b"ARROW1": ("an Arrow file", "a name that ends in .arrow"),
    b"PK\x03\x04": ("a zip archive, or a table of Excel", "its rows as .jsonl"),
}
BETWEEN = re.compile(r"[,\s]*")


def explain(error: Exception, kind: str, names: list[str], where: str) -> UserError:
    """Return the error for the user. It names the file and the line of the fault, if they can be found."""
    if isinstance(error.__cause__, Wrapped):
        [key] = error.__cause__.args
        found = f"one object, which holds rows under its key {key!r}"
        return UserError(where, found, instead=f"Write each row as a line: jq -c '.{key}[]' FILE.json > FILE.jsonl")
    for name in names if kind in ("json", *TEXTS) else ():
        if known := known_magic(name):
            return UserError(place_of_file(name, where), *known)
    if isinstance(error, OSError) and (cache := closed_cache()):
        return UserError(
            "HF_HOME", f"{cache} cannot be made or written", "a folder for the cache of the datasets library"
        )
    find_fault = find_json_fault if kind == "json" else find_bytes_fault if kind in TEXTS else None
    for name in names if find_fault else ():
        if fault := find_fault(name):
            return _fault_error(where, name, *fault)
    if cure := cure_of_map(error, kind):
        return UserError(where, "a column of the type map, which the datasets library cannot read", instead=cure)
    causes = f"{one_line(error)} {one_line(error.__cause__)}"
    if "corresponds to no data" in causes or "No columns to parse" in causes:
        return UserError(where, "no rows")
    return UserError(where, f"cannot be read: {one_line(error.__cause__ or error)}")


def known_magic(path: str) -> tuple[str, str] | None:
    """(what a file is, what would be read), by its first bytes. None: not one of MAGIC."""
    with open(path, "rb") as file:
        start = file.read(8)
    return next((known for magic, known in MAGIC.items() if start.startswith(magic)), None)


def closed_cache() -> str:
    """The cache folder of the datasets library if no file can be written there, or ""."""
    try:
        os.makedirs(datasets.config.HF_DATASETS_CACHE, exist_ok=True)
        with tempfile.TemporaryFile(dir=datasets.config.HF_DATASETS_CACHE):
            return ""
    except OSError:
        return str(datasets.config.HF_DATASETS_CACHE)


def cure_of_map(error: BaseException, kind: str) -> str:
    """How to write a file with a map, such as Spark's, without one; "" for another error of the datasets library."""
    is_map = any("Arrow type map<" in str(cause) for cause in (error, error.__cause__))
    table = "pq.read_table('FILE.parquet')" if kind == "parquet" else "pa.ipc.open_stream('FILE.arrow').read_all()"
    code = f"import json, pyarrow as pa, pyarrow.parquet as pq; rows = {table}.to_pylist(maps_as_pydicts='strict'); "
    code += "[print(json.dumps(row, default=str)) for row in rows]"
    return f'Write its rows as .jsonl: python -c "{code}" > FILE.jsonl' if is_map else ""


def find_bytes_fault(path: str) -> tuple[str, str] | None:
    """Find the first line that is not UTF-8: (line, what is wrong there), or None."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number}", NOT_UTF8
    return None


def _fault_error(where: str, name: str, place: str, found: str) -> UserError:
    cure = next((cure for start, cure in CURES.items() if start in found), "")
    return UserError(f"{place_of_file(name, where)} {place}", found, cure)


def find_json_fault(path: str) -> tuple[str, str] | None:
    """Find the first bad row of a JSON or JSON Lines file: (place, what is wrong there), or None.

    A bad row is a broken line, a row that is not an object, or a key whose type differs from earlier rows.
    """
    seen: dict[str, tuple[str, str]] = {}
    rows = _json_rows(path)
    while True:
        try:
            place, row = next(rows)
        except StopIteration:
            return None
        except _Broken as fault:
            return fault.args
        if row is not None and not isinstance(row, dict):
            return place, f"a {KINDS[type(row)]}, not an object with keys"
        if half := HALF.search(json.dumps(row, ensure_ascii=False)):
            return place, f"\\u{ord(half[0]):x} is one half of a character"
        for key, value in (row or {}).items():
            if value is None:
                continue
            kind = KINDS[type(value)]
            first_kind, first_place = seen.setdefault(key, (kind, place))
            if kind != first_kind:
                return place, f"{key!r} is a {kind} here but a {first_kind} in {first_place}"


class _Broken(Exception):
    """args: place, what is wrong there."""


def _json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row. Raises _Broken where the text is not JSON."""
    with open(path, "rb") as file:
        if is_array(file):
            rows = _parse(file.read(), first_line=1, is_array=True)
            yield from ((f"item {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _parse(line.rstrip(), first_line=number)


def _parse(text: bytes, first_line: int, is_array: bool = False) -> Any:
    try:
        return DECODER.decode(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        place = f"line {first_line + error.lineno - 1}"
        raise _Broken(place, f"broken JSON ({error.msg}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise _Broken(f"line {first_line}", NOT_UTF8) from None
    except RecursionError:
        raise _Broken(f"line {first_line}", "lists or objects are nested too deep") from None
    except Twice as error:
        place = f"item {_item_with_key_twice(text.decode('utf-8-sig'))}" if is_array else f"line {first_line}"
        raise _Broken(place, str(error)) from None
    except ValueError as error:
        raise _Broken(f"line {first_line}", f"broken JSON ({error})") from None


def _item_with_key_twice(text: str) -> int:
    """The number of the first item of a JSON array with a key twice in one object."""
    place, number = text.index("[") + 1, 1
    while True:
        place = BETWEEN.match(text, place).end()
        try:
            _, place = DECODER.raw_decode(text, place)
        except Twice:
            return number
        number += 1

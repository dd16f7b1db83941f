"""Open data sets as streams: the run reads their files one after the other while it trains, and never copies them."""

import glob
import hashlib
import importlib.util
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import datasets
from datasets import data_files

from trainer.comma_separated import names_in
from trainer.datasets.files.input_checks import check_file
from trainer.datasets.files.line_files import ENCODING, Lines
from trainer.datasets.files.mixing import joined
from trainer.datasets.files.read_faults import cure_of_map
from trainer.datasets.files.tar_files import open_tar_files
from trainer.datasets.library import one_line
from trainer.datasets.rows import DECODER
from trainer.datasets.text_flags import parse_probs
from trainer.errors import UserError

LINE = "(line)"  # the column of JSON that is not parsed yet; files of the other kinds have other columns
PLACE = "(place)"
KINDS = {".jsonl": "text", ".ndjson": "text", ".parquet": "parquet", ".tar": "tar"}
COMPRESSED = (".zst", ".gz")
HASHED_WHOLE = 256 << 20  # bytes of all local files together; a busy machine took 8 s
CHUNK_BYTES = 1 << 20  # of lines that are read at a time
ALLOWED = "files *.jsonl, *.parquet or *.tar (also *.jsonl.zst and so on), folders or URLs of them"


def open_rows(
    names: str,
    *,
    flag: str,
    split: str,
    probs: str | None,
    max_samples: int | None,
    seed: int,
    with_places: bool = False,
) -> tuple[datasets.IterableDataset, str]:
    """Return the rows of the comma-separated sets, and a hash of the names and local sizes of their files.

    Without probs, the sets follow each other. With probs, each next row comes from a set sampled with these odds. The
    stream ends when the first set is used up. `with_places`: each row also has the column PLACE, as "FILE row N". Raises UserError for a file that does not exist or cannot be streamed.
    """
    paths = names_in(names)
    odds = None if probs is None else parse_probs(probs, len(paths))
    files = [_files_of(path, f"{flag} {path}", split) for path in paths]
    opened = _open_with_places if with_places else _open
    sets = [opened(found, f"{flag} {path}") for path, found in zip(paths, files, strict=True)]
    if max_samples:
        sets = [rows.take(max_samples) for rows in sets]
    facts = [[_facts_of(name) for name in found] for found in files]
    digest = hashlib.blake2b(json.dumps([facts, odds, max_samples]).encode(), digest_size=8).hexdigest()
    if len(sets) == 1:
        return sets[0], digest
    if any(rows.features != sets[0].features for rows in sets):
        found = "sets whose files or columns are of two kinds"
        allowed = "with --streaming: all jsonl, all tar, or all parquet with the same columns and types"
        raise UserError(flag, found, allowed)
    return joined(sets, odds, seed), digest


class BrokenRow(ValueError):
    """args: (the number of the row in its block, from 0; what is wrong with its JSON)."""


def parsed(block: dict[str, list]) -> list[dict[str, Any]]:
    """The rows of a block of columns. JSON becomes its object, together with the text of the same name in a tar file.

    Raises BrokenRow for JSON that is broken or not an object.
    """
    columns = [name for name in block if name != LINE]
    lines = block.get(LINE) or [None] * len(block[columns[0]])
    rows = []
    for number, line in enumerate(lines):
        others = {name: block[name][number] for name in columns}
        if LINE in block:
            others = {name: value for name, value in others.items() if value is not None}
        if line is None:
            rows.append(others)
        elif line.strip():
            try:
                row = DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                raise BrokenRow(len(rows), one_line(error)) from None
            if not isinstance(row, dict):
                raise BrokenRow(len(rows), f"a line is not a JSON object: {line[:80]}")
            rows.append({**row, **others})
    return rows


def _files_of(path: str, where: str, split: str) -> list[str]:
    """The files of a set, in the order in which they are read."""
    local = os.path.expanduser(path)
    is_folder = os.path.isdir(local) if "://" not in path else not _kind(path)
    if not is_folder and not _kind(path):
        raise UserError(where, "cannot be streamed" if os.path.exists(local) else "file not found", ALLOWED)
    if os.path.isfile(local):
        check_file(local, where, streamed=True)
        return [os.path.abspath(local)]
    try:
        base = os.path.abspath(local) if "://" not in path else path
        patterns = data_files.get_data_patterns(base) if is_folder else {split: [base]}
        patterns = {str(name): found for name, found in patterns.items()}
        if split not in patterns:
            raise UserError(where, f"no split {split!r}", ", ".join(patterns))
        files = [str(name) for name in data_files.DataFilesList.from_patterns(patterns[split], base_path=base)]
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(where, "no file found", ALLOWED) from None
    except Exception as error:  # a protocol that fsspec does not know, or a store that does not answer
        raise UserError(where, f"cannot be read: {one_line(error)}", ALLOWED) from None
    known = [name for name in files if _kind(name)]
    if not known:
        raise UserError(where, "no file that can be streamed", ALLOWED)
    for name in known:
        if "://" not in name:
            check_file(name, f"{where} {name}", streamed=True)
    if len({_kind(name) for name in known}) > 1:
        raise UserError(where, "files of two kinds", "files of one kind in each set")
    return known


def _kind(name: str) -> str | None:
    """The reader of a file, by the end of its name."""
    stem, ending = os.path.splitext(name.lower())
    return KINDS.get(os.path.splitext(stem)[1] if ending in COMPRESSED else ending)


def _open(files: list[str], where: str) -> datasets.IterableDataset:
    if any(name.endswith(".zst") for name in files) and not importlib.util.find_spec("zstandard"):
        raise UserError(where, "a .zst file needs the package zstandard", "pip install zstandard, or other files")
    kind = _kind(files[0])
    if kind == "tar":
        return open_tar_files(files, LINE)
    patterns = {"train": [name if "://" in name else glob.escape(name) for name in files]}
    try:
        if kind == "text":
            own = {"features": datasets.Features({LINE: datasets.Value("string")}), "chunksize": CHUNK_BYTES}
            own["encoding"] = ENCODING
            return Lines(data_files=patterns, **own).as_streaming_dataset(split="train")
        return datasets.load_dataset(kind, data_files=patterns, split="train", streaming=True)
    except Exception as error:  # of any type: the library's message says what is wrong
        if cure := cure_of_map(error, kind):
            raise UserError(where, "a column of the type map", instead=cure) from None
        raise UserError(where, f"cannot be read: {one_line(error)}", ALLOWED) from None


def _open_with_places(files: list[str], where: str) -> datasets.IterableDataset:
    def with_place(row: dict, index: int, name: str) -> dict:
        return row | {PLACE: f"{name} row {index + 1}"}

    return datasets.concatenate_datasets(
        [_open([name], where).map(with_place, with_indices=True, fn_kwargs={"name": name}) for name in files]
    )


def places_of(rows: datasets.IterableDataset, numbers: list[int]) -> list[str]:
    """The places of the rows of these numbers, ascending, in a stream that `open_rows` opened with places."""
    found = (place for block in rows.iter(batch_size=100) for place in _places_of_block(block))
    wanted = set(numbers)
    return [place for number, place in enumerate(islice(found, max(numbers, default=-1) + 1)) if number in wanted]


def _places_of_block(block: dict[str, list]) -> list[str]:
    """The places of the rows that `parsed` finds in a block: an empty line is no row."""
    lines = block.get(LINE) or [None] * len(block[PLACE])
    return [place for place, line in zip(block[PLACE], lines, strict=True) if line is None or line.strip()]


def _facts_of(name: str) -> list:
    """The name of a file, and its size if it is local: a resumed run compares them."""
    return [os.path.basename(name), os.path.getsize(name) if os.path.isfile(name) else None]


def contents_of_files(names: str, split: str) -> dict[str, Any]:
    """Facts of the files of the comma-separated sets, in order, which a resumed run compares:

    - `files`: a hash of the ends of each local file and of parts between, at most 1 MiB.
    - `whole`: a hash of all bytes, up to HASHED_WHOLE. Larger sets have None, since hashing them would take long.
    - `written`: the time of the last change of a local file, where `whole` is None.
    - `not_compared`: the number of files of which no byte or only parts are compared.
    """
    found = [name for path in names_in(names) for name in _files_of(path, path, split)]
    local = [name for name in found if os.path.isfile(name)]
    is_small = sum(map(os.path.getsize, local)) <= HASHED_WHOLE
    digest, whole = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for name in found:
        digest.update(b"\n")
        if name in local:
            _update_by_parts(digest, name)
    if is_small:
        with ThreadPoolExecutor() as pool:  # hashing frees Python's lock
            for own in pool.map(_hash_whole, local):
                whole.update(own)
    times = [os.path.getmtime(name) for name in local]
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(times))) if times and not is_small else None
    return {
        "files": digest.hexdigest(),
        "whole": whole.hexdigest() if local and is_small else None,
        "written": written,
        "not_compared": len(found) - len(local) * is_small,
    }


def _update_by_parts(digest, name: str) -> None:
    size = os.path.getsize(name)
    with open(name, "rb") as file:
        for part in range(16):
            file.seek(size * part // 16)
            digest.update(file.read(1 << 16))
        file.seek(max(0, size - (1 << 16)))
        digest.update(file.read())


def _hash_whole(name: str) -> bytes:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()

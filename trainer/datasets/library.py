"""Calls of the datasets library: without its output, and with cache files that every process of a run finds."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datasets

from trainer.errors import UserError


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and log lines of the library. Our own error reports a fault, and only once."""
    had_bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.enable_progress_bars()


def one_line(error: BaseException | None) -> str:
    """The message of an error on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300] if error else ""


def map_cached(
    rows: datasets.Dataset,
    tokenize_row: Callable[..., dict],
    *,
    folder: str,
    key: list,
    features: datasets.Features,
    num_proc: int | None = None,
    **fn_kwargs: Any,
) -> datasets.Dataset:
    """Run rows.map with a cache file that any process finds again: its name is a hash of the rows and `key`.

    key: all else that decides the result, as JSON values. The call is `tokenize_row(row, index, **fn_kwargs)`.
    """
    fingerprint = hashlib.blake2b(json.dumps([*key, rows._fingerprint]).encode(), digest_size=16).hexdigest()
    # We use our own folder: the library would write next to the data, which may be read-only.
    folder = os.path.join(datasets.config.HF_DATASETS_CACHE, folder)
    os.makedirs(folder, exist_ok=True)
    try:
        with quiet():
            return rows.map(
                tokenize_row,
                with_indices=True,
                fn_kwargs=fn_kwargs,
                remove_columns=rows.column_names,
                features=features,
                num_proc=num_proc if num_proc and num_proc > 1 else None,
                new_fingerprint=fingerprint,
                cache_file_name=os.path.join(folder, f"{fingerprint}.arrow"),
            )
    except UserError as error:  # drops the frames of the library and of a worker process
        raise UserError(*error.args) from None
    except OSError as error:
        allowed = "a folder with free space; HF_DATASETS_CACHE names it"
        raise UserError(folder, error.strerror or str(error), allowed) from None


def place_of_file(name: str, where: str) -> str:
    """The place of a file in errors: `where`, a flag and the name of a set, which may be this file or hold it."""
    return where if where.endswith(name) else f"{where} {name}"

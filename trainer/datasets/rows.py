"""Read texts and token ids from a row, see also `messages`. Every kind of training data uses these functions.

They raise UserError if a value has another type than its key needs.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and log lines of the datasets library. Our own error reports a fault, and only once."""
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


def one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300] if error else ""


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """Everything that decides the tokenizer's output, as JSON values."""
    import transformers

    state: dict[str, Any] = {
        "transformers": transformers.__version__,
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # The last call of the tokenizer left truncation and padding here. Every call sets them again.
        return state | {"backend": {k: v for k, v in backend.items() if k not in ("truncation", "padding")}}
    return state | {"vocab": sorted(tokenizer.get_vocab().items())}


def check_keys(columns: list[str], flag: str, keys: dict[str, str | None]) -> None:
    """Check that the dataset `flag` has all keys. Raises UserError that names the flag of a missing key."""
    for key_flag, key in keys.items():
        if key is not None and key not in columns:
            raise UserError(key_flag, f"no key {key!r} in the rows of {flag}", ", ".join(columns))


def text_of(row: Any, key_flag: str, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        found = "no value" if value is None else f"a {KINDS.get(type(value), type(value).__name__)}"
        raise UserError(f"{key_flag} {key}", found, "a text")
    return value


class AsWritten(dict):
    """An object as it is in its file. Objects from Arrow have the keys of all rows, with None for missing values."""


def with_special_tokens(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that continues: with the tokenizer's opening tokens, without the eos it may add at the end."""
    input_ids = list(tokenizer(text)["input_ids"])
    eos = tokenizer.eos_token_id
    if input_ids and input_ids[-1] == eos and tokenizer("a")["input_ids"][-1] == eos:
        input_ids.pop()
    return input_ids


def with_eos(tokenizer: Any, input_ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return list(input_ids) if input_ids and input_ids[-1] == eos else [*input_ids, eos]


def is_stop_token(tokenizer: Any, token: int) -> bool:
    """Whether a token ends a turn or a text: the eos token or any special token of the vocabulary."""
    if token in tokenizer.all_special_ids:
        return True
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and added.special


def digest_of(input_ids: list[int]) -> str:
    return hashlib.blake2b(np.asarray(input_ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()


def map_cached(
    rows: "Dataset",
    tokenize_row: Any,
    *,
    folder: str,
    key: list,
    features: "Features",
    num_proc: int | None = None,
    **fn_kwargs: Any,
) -> "Dataset":
    """Run rows.map with a cache file that any process finds again: its name is a hash of the rows and `key`.

    key: all else that decides the result, as JSON values. The call is `tokenize_row(row, index, **fn_kwargs)`.
    """
    import datasets

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

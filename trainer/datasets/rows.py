"""What every kind of training data reads from a row: texts, messages, token ids with their special tokens.

Raises UserError where a value is not what its key promises.
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
ROLES = {"human": "user", "gpt": "assistant"}  # the role names of `conversations` data


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


def one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:300] if error else ""


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """What decides the tokenizer's output, as JSON values."""
    import transformers

    state: dict[str, Any] = {
        "transformers": transformers.__version__,
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by whoever called the tokenizer last; every call sets them anew.
        return state | {"backend": {k: v for k, v in backend.items() if k not in ("truncation", "padding")}}
    return state | {"vocab": sorted(tokenizer.get_vocab().items())}


def check_keys(columns: list[str], flag: str, keys: dict[str, str | None]) -> None:
    """Raises UserError for a key, by its flag, that the rows of the dataset `flag` do not have."""
    for key_flag, key in keys.items():
        if key is not None and key not in columns:
            raise UserError(key_flag, f"no key {key!r} in the rows of {flag}", ", ".join(columns))


def text_of(row: Any, key_flag: str, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        found = "no value" if value is None else f"a {KINDS.get(type(value), type(value).__name__)}"
        raise UserError(f"{key_flag} {key}", found, "a text")
    return value


def messages_of(value: Any, where: str) -> list[dict]:
    """Messages with role and content, from those or from {from, value}; keys without a value are dropped."""
    if not isinstance(value, list):
        found = "no value" if value is None else f"a {KINDS.get(type(value), type(value).__name__)}"
        raise UserError(where, found, "a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        message = _without_none(message)
        if isinstance(message, dict) and "from" in message and "role" not in message:
            message = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where} message {number}", "no role", "an object with role and content, or from and value"
            )
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""  # a pure tool call; templates differ on an absent content, none trips over ""
        if not isinstance(message.get("content"), str):
            raise UserError(f"{where} message {number}", "its content is no text", "a text")
        messages.append(message)
    return messages


def tools_of(row: Any) -> list[dict] | None:
    """What stands under `tools` of a row: JSON schemas of functions, as a list or as its JSON; None where there is nothing."""
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value, object_hook=AsWritten) if value.strip() else None
        except json.JSONDecodeError as error:
            raise UserError("column tools", f"broken JSON ({error.msg})", "a list of objects, or its JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError("column tools", "no list of objects", "a list of objects, or its JSON")
    return [tool if isinstance(tool, AsWritten) else _without_none(tool) for tool in value]


class AsWritten(dict):
    """An object as its file has it; Arrow's have all keys of all rows, with None under those of others."""


def _without_none(value: Any) -> Any:
    """Without keys that hold None, which a template would print; a null that was written among a tool's arguments stays."""
    if isinstance(value, dict):
        present = {key: child for key, child in value.items() if child is not None}
        kept = {key for key, child in present.items() if key == "arguments" and isinstance(child, AsWritten)}
        return {key: child if key in kept else _without_none(child) for key, child in present.items()}
    return [_without_none(child) for child in value] if isinstance(value, list) else value


def with_special_tokens(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that goes on: with the tokenizer's opening tokens, without a closing eos it would add."""
    input_ids = list(tokenizer(text)["input_ids"])
    eos = tokenizer.eos_token_id
    if input_ids and input_ids[-1] == eos and tokenizer("a")["input_ids"][-1] == eos:
        input_ids.pop()
    return input_ids


def with_eos(tokenizer: Any, input_ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return list(input_ids) if input_ids and input_ids[-1] == eos else [*input_ids, eos]


def is_stop_token(tokenizer: Any, token: int) -> bool:
    """Whether a token ends a turn or a text: the eos token, or any special token of the vocabulary."""
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
    """rows.map with a cache file that any process finds again: its name says all that decides its content.

    `key` holds, as JSON values, whatever decides the result beside the rows. `tokenize_row(row, index, **fn_kwargs)`.
    """
    import datasets

    fingerprint = hashlib.blake2b(json.dumps([*key, rows._fingerprint]).encode(), digest_size=16).hexdigest()
    # Our own folder: beside the data, where the library would write, may be read-only.
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
    except UserError as error:  # without the library's frames, or those of a worker process
        raise UserError(*error.args) from None

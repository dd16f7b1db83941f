"""A folder of token samples, as `prepare_data` writes it: the samples, the facts about them, and the check of both."""

import hashlib
import json
import os
import shutil
from typing import Any

from datasets import Dataset, DatasetDict

from trainer.datasets.conversations.tokens import TOKENIZER_VERSION, tokenizer_state
from trainer.datasets.library import quiet
from trainer.errors import UserError
from trainer.limits import read_text

FACTS = "prepared.json"
PREPARED = "stop_trained"  # a column that only tokenized rows have
# the flags that decide the tokens
OPTIONS = ("max_len", "input_key", "output_key", "input_template", "apply_chat_template", "train_on", "pretrain_mode")
OPTIONS += ("ignore_columns", "system")


def is_prepared(rows: Dataset) -> bool:
    """Whether some of the rows are tokenized already."""
    return PREPARED in rows.column_names


def write_prepared(
    samples: Dataset,
    tokenizer: Any,
    options: dict[str, Any],
    counts: dict[str, int],
    target: str,
    num_proc: int | None = None,
) -> None:
    """Write tokenized rows and their facts to the new folder `target`. It gets its name when it is complete.

    `options` are the values of OPTIONS, and `counts` the ledger's. Raises UserError if the folder cannot be written.
    """
    temporary = target + ".tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with quiet():
            # several files: every rank maps them into memory, and the processes share the writing
            DatasetDict({"train": samples}).save_to_disk(temporary, num_proc=num_proc)
        write_facts(temporary, tokenizer, options, counts)
        os.replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError("--output_dir", f"{target}: {error.strerror or error}", "a folder with free space") from None


def write_facts(folder: str, tokenizer: Any, options: dict[str, Any], counts: dict[str, int]) -> None:
    """Write prepared.json: a hash of the tokenizer, the options and the counts of the ledger."""
    facts = {"version": TOKENIZER_VERSION, "tokenizer": tokenizer_hash(tokenizer), "options": options, "ledger": counts}
    with open(os.path.join(folder, FACTS), "w") as file:
        json.dump(facts, file, indent=1)


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of what decides the tokens. The version of transformers is left out: a new one does not spoil a folder."""
    state = {name: value for name, value in tokenizer_state(tokenizer).items() if name != "transformers"}
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def _facts_of(folder: str, flag: str) -> dict:
    """The facts of a folder, which others may have made. Raises UserError for another form."""
    try:
        facts = json.loads(read_text(os.path.join(folder, FACTS), flag))
        _ = facts["tokenizer"], facts["options"].keys(), facts.keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(
            flag, f"{folder}/{FACTS} has another form than prepare_data writes", "prepare_data again"
        ) from None
    return facts


def checked(rows: Dataset, tokenizer: Any, flag: str, wanted: dict[str, Any], columns: set[str]) -> Dataset:
    """Return prepared rows, with new row numbers. `wanted`: the options of the run. `columns`: of prepared rows.

    Raises UserError if the rows were made by another tokenizer or with other options. A flag that is not given takes
    the value that the folder was prepared with; only max_len must be the same.
    """
    folders = {os.path.dirname(os.path.dirname(file["filename"])) for file in rows.cache_files}
    found = [folder for folder in sorted(folders) if os.path.exists(os.path.join(folder, FACTS))]
    if not found:
        raise UserError(flag, f"tokens without the file {FACTS}", "a folder that prepare_data wrote")
    for folder in found:
        facts = _facts_of(folder, flag)
        if facts.get("version") != TOKENIZER_VERSION:
            raise UserError(flag, f"{folder} was prepared by another version of the trainer", "prepare_data again")
        if facts["tokenizer"] != tokenizer_hash(tokenizer):
            raise UserError(flag, f"{folder} was prepared with another tokenizer or chat template", "the same one")
        for name, value in wanted.items():
            before = facts["options"].get(name)
            if value != before and (value or name == "max_len"):
                raise UserError(f"--{name}", f"{value}, but {folder} was prepared with {before}", str(before))
    if set(rows.column_names) != columns:
        found = "rows that prepare_data has tokenized, and others"
        raise UserError(flag, found, "one kind; prepare_data takes several sets")
    numbers = list(range(len(rows))) if len(found) > 1 else None
    return rows.remove_columns("row").add_column("row", numbers) if numbers else rows

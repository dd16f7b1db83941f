"""Token samples that `prepare_data` wrote to a folder: the facts beside them, and the check that they fit a run."""

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from trainer.datasets.rows import tokenizer_state
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

FACTS = "prepared.json"
# the flags that decide the tokens
OPTIONS = ("max_len", "input_key", "output_key", "input_template", "apply_chat_template", "multiturn", "pretrain_mode")


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of what decides the tokens. The version of transformers is left out: a new one does not spoil a folder."""
    state = {name: value for name, value in tokenizer_state(tokenizer).items() if name != "transformers"}
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_facts(folder: str, tokenizer: Any, options: dict[str, Any], ledger: dict[str, int]) -> None:
    facts = {"tokenizer": tokenizer_hash(tokenizer), "options": options, "ledger": ledger}
    with open(os.path.join(folder, FACTS), "w") as file:
        json.dump(facts, file, indent=1)


def checked(rows: "Dataset", tokenizer: Any, flag: str, wanted: dict[str, Any], columns: set[str]) -> "Dataset":
    """Return prepared rows, numbered anew. `wanted` are the options of the run, and `columns` those of prepared rows.

    Raises UserError if the rows were made by another tokenizer or with other options. A flag that is not given takes
    the value that the folder was prepared with; only max_len must be the same.
    """
    if set(rows.column_names) != columns:
        found = "rows that prepare_data has tokenized, and others"
        raise UserError(flag, found, "one kind; prepare_data takes several sets")
    folders = {os.path.dirname(os.path.dirname(file["filename"])) for file in rows.cache_files}
    found = [folder for folder in sorted(folders) if os.path.exists(os.path.join(folder, FACTS))]
    if not found:
        raise UserError(flag, f"tokens without the file {FACTS}", "a folder that prepare_data wrote")
    for folder in found:
        with open(os.path.join(folder, FACTS)) as file:
            facts = json.load(file)
        if facts["tokenizer"] != tokenizer_hash(tokenizer):
            raise UserError(flag, f"{folder} was prepared with another tokenizer or chat template", "the same one")
        for name, value in wanted.items():
            before = facts["options"][name]
            if value != before and (value or name == "max_len"):
                raise UserError(f"--{name}", f"{value}, but {folder} was prepared with {before}", str(before))
    numbers = list(range(len(rows))) if len(found) > 1 else None
    return rows.remove_columns("row").add_column("row", numbers) if numbers else rows

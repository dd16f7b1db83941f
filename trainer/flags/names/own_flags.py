"""Flags that hold for one set of --dataset only, as --dataset_flags has them: a JSON list with an object for each set."""

import json
from typing import Any

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.metrics import counted

FLAGS_OF = {"dataset": "dataset_flags", "eval_dataset": "eval_dataset_flags"}
SPLIT_OF = {"dataset": "dataset_split", "eval_dataset": "eval_split"}
SPLIT, MAX_SAMPLES = "split", "max_samples"


def read(text: str | None, flag: str, names: str | None) -> list[dict[str, Any]]:
    """The own flags of each set in the `names` of `flag`. Empty: all sets are read in the same way.

    Raises UserError for a text that is no JSON list of objects, or has not one for each set.
    """
    where = f"--{FLAGS_OF[flag]}"
    try:
        own = json.loads(text) if text is not None else []
    except ValueError:
        own = None
    if not isinstance(own, list) or not all(isinstance(one, dict) for one in own):
        shown = " ".join(str(text).split())[:80]
        raise UserError(where, shown, 'a JSON list of objects, such as [{"input_key": "q"}, {}]')
    if text is not None and len(own) != len(names_in(names)):
        raise UserError(
            where,
            f"{counted(len(own), 'object')} for {counted(len(names_in(names)), 'set')}",
            f"one for each set of --{flag}",
        )
    return own


def as_flags(own: dict[str, Any], flag: str) -> dict[str, Any]:
    """The own flags of a set of `flag`, as flags of the command. Its `max_samples` goes over --max_eval_samples."""
    found = {SPLIT_OF[flag] if name == SPLIT else name: value for name, value in own.items()}
    return found | ({"max_eval_samples": own[MAX_SAMPLES]} if flag == "eval_dataset" and MAX_SAMPLES in own else {})

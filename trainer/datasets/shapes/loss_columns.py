"""Columns of a row that say whether its answer is trained, or how much: they are used, or refused."""

import re
from typing import Any

from trainer.datasets.conversations.messages import IGNORE, LOSS_WORDS
from trainer.datasets.rows import truth_value
from trainer.datasets.shapes.notes import Notes, summed
from trainer.errors import UserError

# true: the answer is trained
FLAGS = ("loss", "train", "trainable", "loss_mask", "weight", "weights", "loss_weight", "loss_weights")
FLAGS += ("sample_weight", "sample_weights", "loss_scale", "training", "is_trainable", "compute_loss", "has_loss")
# chosen_weight and weight_rejected are the weight of an answer
PART = re.compile(r"(^|[_-])(chosen|rejected|prompt|completion|response|answer|output|pair|row|token|tokens)(?=[_-]|$)")
LEAVES_OUT = re.compile(r"ignor|skip|exclud|omit|drop|mask|(^|[^a-z])un")  # true: the answer may not be trained


def is_trained(columns: Any, notes: Notes) -> bool:
    """Whether a row for train_sft has a loss, by its `Columns`. Those that say so are used up and noted."""
    found = {name: truth_value(columns.row.get(name)) for name in FLAGS if name not in columns.used | columns.taken}
    found = {name: value for name, value in found.items() if value is not None}
    columns.used |= found.keys()
    if len(set(found.values())) > 1:
        raise UserError(f"columns {', '.join(found)}", "contradict each other", f"{IGNORE} with all but one")
    for name, value in found.items():
        without = f"column {name} leaves no row out of the loss"
        notes.facts.add(
            summed(f"column {name} leaves {{}} of {{:row}} out of the loss", int(not value), 1, without=without)
        )
    return all(found.values())


def refuse_loss_column(name: str, kind: str, value: Any) -> None:
    """Raise UserError for a column that nothing read, if its value would change the loss. `kind` is its known name.

    Other names only count with a truth value: `dropped: true` says something of the training, `dropout: 0.1` does not.
    So do numbers in a list, but for ones: `train_on_turns: [0]`.
    """
    truth = truth_value(value)
    if kind in FLAGS or PART.sub("", kind.lower()).strip("_-") in FLAGS:
        changes = truth is not True
    else:
        is_flag = isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false"))
        is_list = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
        says_so = truth is bool(LEAVES_OUT.search(kind)) if is_flag else is_list and any(item != 1 for item in value)
        changes = bool(LOSS_WORDS.search(kind)) and says_so
    if changes:
        found = f"{str(value)[:40]!r} would change the loss, and is not used here"
        cure = "only rows that are trained" if truth is not None else "true or false, 1 or 0, in train_sft"
        raise UserError(f"column {name}", found, f"{cure}; or {IGNORE} {name}")

"""Which flags of somebody else's run may be taken from its files. A right comes from the command line, never from data.

Numbers, choices and switches are values. A text may name code, a file or an address, so only these texts are values.
"""

import os
import re
from collections.abc import Iterable

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.flags.parse_flags import flags_of

PLAIN_TEXTS = frozenset([
    "dataset_split", "dataset_probs", "dataset_flags", "eval_dataset_flags", "eval_split", "input_template",
    "tokenizer_chat_template", "input_key", "output_key", "prompt_key", "chosen_key", "rejected_key",
    "completion_key", "label_key", "margin_key", "value_head_prefix", "target_modules", "lr_scheduler", "loss",
    "policy_loss", "preset", "stop", "best_metric_key", "wandb_project", "run_name",
])  # fmt: skip
# read, never run or written: accepted if they are here, so that nothing is fetched
READ_HERE = frozenset({"pretrain", "dataset", "eval_dataset", "teacher", "ref_model", "lora_adapter"})
SWITCHES = frozenset({"trust_remote_code", "use_wandb", "overwrite", "push_to_hub"})  # switches that are rights


def is_value(name: str, hint) -> bool:
    """Whether a flag of this type grants no right, whatever its value."""
    return name in PLAIN_TEXTS or (name not in SWITCHES and not _holds_text(hint))


def _holds_text(hint) -> bool:
    """Whether values of this type are free texts: str, Optional[str] or list[str]."""
    parts = getattr(hint, "__args__", ())
    return hint is str or any(
        _holds_text(part) for part in parts if isinstance(part, type) or hasattr(part, "__args__")
    )


def is_here(name: str) -> bool:
    """Whether a name of a set or model is a file or a folder of this machine, also with #N after it."""
    path = os.path.expanduser(name.strip())
    return any(os.path.isfile(one) or os.path.isdir(one) for one in (path, re.sub(r"#[1-9]\d*$", "", path)))


def refuse_rights(command: type, values: dict, given: Iterable[str], source: str) -> None:
    """Raise UserError for a flag in `values`, read from `source`, that grants a right and is not `given` by the user.

    A model or data folder that is on this machine is accepted: it is read only.
    """
    hints = {field.name: hint for field, hint in flags_of(command)}
    for name, value in values.items():
        if not value or name in given or (name in hints and is_value(name, hints[name])):
            continue
        if name in READ_HERE and isinstance(value, str) and all(map(is_here, names_in(value))):
            continue
        shown = " ".join(str(value).split())[:80]
        found = f"{source} asks for {shown}, but a file grants no right to code, network or files"
        raise UserError(f"--{name}", found, f"--{name} on the command line, if you trust it")

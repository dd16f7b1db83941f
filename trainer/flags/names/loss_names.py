"""The names that --loss and --policy_loss take, read from the tables of losses without torch, and other trainers' names."""

import ast
from collections.abc import Collection
from pathlib import Path

from trainer.comma_separated import names_in
from trainer.errors import UserError

LOSSES = Path(__file__).parents[2] / "models" / "losses"
TABLES = {
    "train_dpo": ("--loss", "preference_loss.py", "PAIR_LOSSES"),
    "train_dpo --online": ("--loss", "preference_loss.py", "PAIR_LOSSES"),
    "train_rm": ("--loss", "preference_loss.py", "REWARD_LOSSES"),
    "train_ppo": ("--policy_loss", "policy_loss.py", "POLICY_LOSSES"),
}
SUMS = ("train_dpo", "train_dpo --online")  # commands whose --loss may have several names
# names of TRL, LLaMA-Factory and verl that are no names here
ELSEWHERE = {
    "--loss": {
        "sigmoid": "--loss dpo", "kto_pair": "--loss kto", "bco_pair": "--loss bco", "nca_pair": "--loss nca",
        "sppo_hard": "--loss sppo", "sft": "--nll_loss_coef 1",
    },
    "--policy_loss": {
        "vanilla": "--policy_loss ppo", "sequence": "--policy_loss gspo", "token": "--policy_loss ppo",
        "grpo": "--preset grpo", "dr_grpo": "--preset dr_grpo", "dapo": "--preset dapo",
    },
}  # fmt: skip


def check_loss_names(command: str, given: str) -> None:
    """Raise UserError for a loss that the tables do not have. `given` is the value of --loss or --policy_loss."""
    flag, file, table = TABLES[command]
    known = keys_of(LOSSES / file, table)
    names = names_in(given) if command in SUMS else [given]
    allowed = (*known, *(("kto",) if command == "train_dpo" and len(names) < 2 else ()))
    for name in names or [given]:
        if known and name not in allowed:
            ours = ELSEWHERE[flag].get(name) if command != "train_rm" else None
            raise UserError(flag, given, ", ".join(allowed), f"Here that is {ours}." if ours else "")


def check_names_in(table: Collection[str], flag: str, names: list[str]) -> None:
    """Raise UserError for a loss that the table itself lacks: `check_loss_names` passes all where it cannot read a key."""
    for name in names:
        if name not in table:
            raise UserError(flag, name, ", ".join(table))


def keys_of(file: Path, table: str) -> tuple[str, ...]:
    """The keys of a dict that a Python file writes down. () if one of them is not written as a text."""
    for node in ast.parse(file.read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(getattr(node, "value", None), ast.Dict) and any(getattr(t, "id", "") == table for t in targets):
            keys = [getattr(key, "value", None) for key in node.value.keys]
            return tuple(keys) if all(isinstance(key, str) for key in keys) else ()
    return ()

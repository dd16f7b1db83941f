"""The table of rules: every refusal of a pair of flags, by command. It imports no torch.

The commands, the strategies, `plan` and docs/flags.md read this table. README.md links to that page.
"""

from collections.abc import Iterator
from typing import Any

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.generating_flags import OnlineDPOArguments
from trainer.flags.groups import flat, with_flags
from trainer.flags.kd_flags import KDArguments
from trainer.flags.layout_rules import DEEPSPEED_RULES, FSDP2_RULES
from trainer.flags.names.own_flags import FLAGS_OF, as_flags, read
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.flags.preference_rules import DPO_RULES, KD_RULES, ONLINE_RULES, REWARD_RULES
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rl_rules import PPO_RULES
from trainer.flags.rollout_rules import ROLLOUT_RULES
from trainer.flags.rule import Rule, first_refusal
from trainer.flags.training_rules import EXACT_ROLLOUT_RULES, EXACT_RULES, EXACT_TEACHER_RULES, NEVER, TRAINING_RULES

COMMANDS: dict[str, type] = {
    "train_sft": SFTArguments,
    "train_rm": RMArguments,
    "train_dpo": DPOArguments,
    "train_ppo": PPOArguments,
    "train_dpo --online": OnlineDPOArguments,
    "train_kd": KDArguments,
}

OWN_RULES: dict[str, tuple[Rule, ...]] = {
    "train_sft": EXACT_RULES,
    "train_rm": (*EXACT_RULES, *REWARD_RULES),
    "train_dpo": (*EXACT_RULES, *DPO_RULES),
    "train_ppo": (*EXACT_RULES, *EXACT_ROLLOUT_RULES, *PPO_RULES, *ROLLOUT_RULES),
    "train_dpo --online": (*ONLINE_RULES, *ROLLOUT_RULES),
    "train_kd": (*EXACT_RULES, *EXACT_TEACHER_RULES, *KD_RULES),
}
RULES: dict[str, tuple[Rule, ...]] = {
    command: (*NEVER.get(command, ()), *TRAINING_RULES, *own) for command, own in OWN_RULES.items()
}

# of the strategies, which read them from their options: see strategies/options.py
BACKEND_RULES: dict[str, tuple[Rule, ...]] = {"fsdp2": FSDP2_RULES, "deepspeed": DEEPSPEED_RULES}


def refuse(command: str, args, **facts) -> None:
    """Raise UserError for the first pair of flags in `args` that do not go together, for all sets or for one.

    `facts` are known by now besides the flags; `rule.UNKNOWN` lists them. The same rules are asked again when more is
    known.
    """
    for where, own in flags_of_sets(flat(args)):
        error = first_refusal(RULES[command], with_flags(args, **own) if own else args, COMMANDS.values(), **facts)
        if error:
            raise UserError(f"{where}: {error.where}" if own else error.where, *error.args[1:])


def flags_of_sets(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, own flags) of each set, if sets have flags of their own; else one place "" without any. `values` are flat."""
    found = []
    for flag, own_flag in FLAGS_OF.items():
        own = read(values.get(own_flag), flag, values.get(flag))
        found += [(f"--{flag} {name}", as_flags(one, flag)) for name, one in zip(names_in(values.get(flag)), own)]
        if values.get(flag) and not own:
            found.append(("", {}))
    yield from found or [("", {})]

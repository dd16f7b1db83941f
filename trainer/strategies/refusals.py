"""What a backend refuses, from the table of rules. `plan` reads this too, so neither backend is imported here."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from trainer.errors import UserError
from trainer.flags.layout_rules import DEEPSPEED_RULES, FSDP2_RULES
from trainer.flags.rule import UNKNOWN, Rule, excluded, first_broken
from trainer.flags.rules import BACKEND_RULES
from trainer.strategies.options import StrategyOptions


def _refuse(rules: tuple[Rule, ...], options: StrategyOptions, **facts: Any) -> None:
    values = dataclasses.asdict(options)
    known = SimpleNamespace(**{**UNKNOWN, **values, **facts})
    error = first_broken(rules, values, dataclasses.asdict(StrategyOptions()), known)
    if error:
        raise error


def refuse_on_fsdp2(options: StrategyOptions) -> None:
    """Raise UserError for what the FSDP2 strategy cannot do."""
    _refuse(FSDP2_RULES, options)


def excluded_flags(backend: str, options: StrategyOptions, on_cpu: bool = False) -> list[str]:
    """What the rows of a backend would refuse beside these options, a line for each row."""
    values, defaults = dataclasses.asdict(options), dataclasses.asdict(StrategyOptions())
    known = SimpleNamespace(**{**UNKNOWN, **values, "on_cpu": on_cpu})
    return excluded(BACKEND_RULES[backend], values, defaults, known)


def refuse_on_deepspeed(options: StrategyOptions, on_cpu: bool = False) -> None:
    """Raise UserError for what the DeepSpeed strategy cannot do."""
    if options.zero_stage not in (None, 0, 1, 2, 3):
        raise UserError("--zero_stage", str(options.zero_stage), "0, 1, 2 (the default), 3")
    _refuse(DEEPSPEED_RULES, options, on_cpu=on_cpu)

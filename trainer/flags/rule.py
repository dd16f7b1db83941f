"""A rule: a flag that does not go together with another flag, the reason, and what to do instead."""

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from trainer.errors import UserError
from trainer.flags.groups import flat, groups_of

# What a rule may know besides the flags. A value here means "not known yet", and refuses nothing.
UNKNOWN: dict[str, Any] = {
    "num_ranks": 0,
    "needs_labels": False,  # a reward function compares with labels, and rows have none that is known
    "is_demo": False,
    "on_cpu": False,
    "on_gpu": False,
    "has_images": False,  # rows have images
    "no_images": False,  # no row has an image
    "has_conversations": None,  # rows are lists of messages, or the chat template makes them
    "has_prompts": None,  # rows have a prompt apart from the answer
    "loss_names": (),  # of --loss, a sum of losses
    "loss_has_reference": None,
    "loss_has_smoothing": None,
    "loss_has_divergence": None,
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table of rules.

    `flags` are names without dashes, separated by spaces. Each one is refused if it is used (its value is not its
    default) and `when` is true. If only some values are refused, `values` lists them, or `when` compares and `which`
    says it in words, such as "below 0.01". `when` takes all flags and facts as attributes; flags that the command lacks
    have their defaults. `against` reads on from the flag: "with --packing_samples", "without --lora_rank". It may name
    values in braces, such as "with --loss {loss}". `why` is the reason. `instead` is a whole sentence.
    """

    flags: str
    when: Callable[[SimpleNamespace], Any]
    against: str
    why: str
    instead: str
    values: tuple = ()
    which: str = ""

    def uses(self, flag: str, values: dict[str, Any], defaults: dict[str, Any]) -> bool:
        """Whether a flag has a value that this row is about. An empty text is none."""
        return values[flag] not in (defaults[flag], "") and (not self.values or values[flag] in self.values)

    def subject(self) -> str:
        """The flags, with the values that the row is about: --layout auto, --temperature below 0.01."""
        flags = ", ".join(f"--{flag}" for flag in self.flags.split())
        *values, last = [str(value) for value in self.values] or [self.which]
        return f"{flags} {' or '.join(filter(None, [', '.join(values), last]))}".rstrip()

    def refusal(self, flag: str, known: SimpleNamespace) -> UserError:
        """The error for one of the flags."""
        value = vars(known)[flag]
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        shown = shown.lower() if value is False else shown.replace("\n", r"\n")
        name = f"--{flag}" if value is True else f"--{flag} {shown}"
        against, why = (text.format(**vars(known)) for text in (self.against, self.why))
        return UserError(f"{name} {against}", why, instead=self.instead)


def knowledge(args, commands: Iterable[type], **facts) -> SimpleNamespace:
    """All flags of all `commands` and all facts, as attributes: those of `args` and `facts`, else the defaults."""
    unknown = facts.keys() - UNKNOWN.keys()
    if unknown:
        raise TypeError(f"no such facts: {', '.join(sorted(unknown))}")
    return SimpleNamespace(**{**defaults_of(commands), **flat(args), **UNKNOWN, **facts})


def defaults_of(commands: Iterable[type]) -> dict[str, Any]:
    """The default value of every flag of these commands."""
    return {
        name: value
        for command in commands
        for kind in groups_of(command).values()
        for name, value in vars(kind()).items()
    }


def first_refusal(rules: Iterable[Rule], args, commands: Iterable[type], **facts) -> UserError | None:
    """The error for the first rule that `args` break. Default values are never refused."""
    return first_broken(rules, flat(args), flat(type(args)()), knowledge(args, commands, **facts))


def excluded(
    rules: Iterable[Rule], values: dict[str, Any], defaults: dict[str, Any], known: SimpleNamespace
) -> list[str]:
    """What could not be added to these flat values, a line for each rule. Rules that compare a number are left out."""
    lines = []
    for rule in rules:
        is_free = all(values.get(flag) == defaults.get(flag) for flag in rule.flags.split())
        if is_free and not rule.which and rule.when(known):
            lines.append(f"{rule.subject()} {rule.against}: {rule.why}".format(**vars(known)))
    return lines


def first_broken(
    rules: Iterable[Rule], values: dict[str, Any], defaults: dict[str, Any], known: SimpleNamespace | None = None
) -> UserError | None:
    """The error for the first rule that these flat values break. `known` is what the rules may ask: by default, `values`."""
    known = known or SimpleNamespace(**values)
    for rule in rules:
        used = [name for name in rule.flags.split() if name in values and rule.uses(name, values, defaults)]
        if used and rule.when(known):
            return rule.refusal(used[0], known)
    return None

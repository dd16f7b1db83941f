"""Who set a flag that a refusal names, when the user did not type it: a file of --config, --preset or --teacher."""

import functools
import re
from collections.abc import Callable
from typing import Any

import yaml

from trainer.errors import UserError
from trainer.flags.names.presets import PRESETS
from trainer.flags.names.repeats import tell
from trainer.flags.parse_flags import read_yaml

OF_TEACHER = ("advantage_estimator", "ref_model", "init_kl_coef")


def naming_sources(act: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
    """`act(argv)`, whose UserError says who set the flags that it names and that are not in `argv`. It tells of repeated flags."""

    @functools.wraps(act)
    def named(argv: list[str]) -> Any:
        tell(argv)
        try:
            return act(argv)
        except UserError as error:
            flags = re.findall(r"--(\w+)", error.where)
            found = sources_of(flags, argv)
            if not found:
                raise
            names = {flag: f"--{flag} is from" if len(flags) > 1 else "from" for flag in found}
            sources = ", ".join(f"{names[flag]} {source}" for flag, source in found.items())
            raise type(error)(f"{error.where} ({sources})", *error.args[1:]) from None

    return named


def sources_of(flags: list[str], argv: list[str]) -> dict[str, str]:
    """{flag: what set it} of those that are not in `argv`. A flag that only has its default has no source."""
    typed, given = {}, {}
    for place, word in enumerate(argv):
        name, is_joined, value = word.partition("=")
        value = value if is_joined else "".join(argv[place + 1 : place + 2])
        if name == "--config":
            given |= {key: (own, f"--config {value}") for key, own in _keys(value).items()}  # the last file wins
        elif name.startswith("--"):
            typed[name.removeprefix("--")] = value
    preset, teacher = (typed.get(name, given.get(name, ("",))[0]) for name in ("preset", "teacher"))
    found = dict.fromkeys(OF_TEACHER, "--teacher") if teacher else {}
    if isinstance(preset, str):  # the parser refuses another value of a file
        found |= dict.fromkeys(PRESETS.get(preset, ()), f"--preset {preset}")
    found |= {name: source for name, (_, source) in given.items()}
    return {flag: found[flag] for flag in flags if flag in found and flag not in typed}


def _keys(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            values = read_yaml(file)
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # the parser says so
    return values if isinstance(values, dict) else {}

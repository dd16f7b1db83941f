"""A flag that a command line gives more than once. The parsers keep the last value; a person is told."""

import os

from trainer.errors import UserError

ANNOUNCED = "TRAINER_ANNOUNCED"  # a variable for ranks: the process that starts them has printed the first lines
OFTEN = frozenset(["config", "limits"])  # files that add to each other
# one text names several, so a person who repeats the flag may want both
WITH_COMMAS = frozenset([
    "dataset", "eval_dataset", "reward_func", "reward_pretrain", "remote_rm_url", "engine_urls", "target_modules", "report_to",
    "ignore_columns", "teacher", "add_tokens",
])  # fmt: skip


def repeated(argv: list[str]) -> dict[str, list[str]]:
    """{flag: its values, as typed} of each flag that `argv` gives more than once with different values."""
    found: dict[str, list[str]] = {}
    value: list[str] = []
    for word in argv:
        if word == "--":
            break
        if word.startswith("--"):
            name, is_joined, text = word.removeprefix("--").partition("=")
            found.setdefault(name, []).append("")
            value = found[name]
            word = text if is_joined else ""
        if value:
            value[-1] = f"{value[-1]} {word}".strip()
    return {name: values for name, values in found.items() if len(set(values)) > 1 and name not in OFTEN}


def lines_of(argv: list[str]) -> list[str]:
    """One line about each repeated flag: which value counts, and how to give all of them."""
    lines = []
    for name, values in repeated(argv).items():
        line = f"WARNING: --{name} is given {len(values)} times, and the last one counts: {values[-1] or 'on'}"
        lines.append(line + (f"; all of them: --{name} {','.join(values)}" if name in WITH_COMMAS else ""))
    return lines


def tell(argv: list[str]) -> None:
    """Print the lines once for all ranks: a script with "$@" may override its own flags, so training goes on."""
    if int(os.environ.get("RANK", 0)) == 0 and ANNOUNCED not in os.environ:
        for line in lines_of(argv):
            print(line, flush=True)


def refuse_repeated(argv: list[str]) -> None:
    """Raise UserError for the first repeated flag of a command that no script wraps."""
    for name, values in repeated(argv).items():
        raise UserError(f"--{name}", f"given {len(values)} times: {', '.join(values)}", "one of them")

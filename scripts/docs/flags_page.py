"""Write docs/flags.md, all flags and those that do not go together, from trainer/flags: `python scripts/docs/flags_page.py`."""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trainer.flags.parse_flags import ALLOWED, flags_of, groups_of
from trainer.flags.rule import UNKNOWN, Rule
from trainer.flags.rules import BACKEND_RULES, COMMANDS, RULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
HEAD = """<!-- Written by scripts/docs/flags_page.py from the arguments of the commands. Do not edit. -->

# All flags

This page lists every flag of the training commands: its values, its default and what it does.
A script writes this page from the source code. After a change of a flag, write it again:

<!-- run by: test/docs/test_flags_page.py -->
```bash
python scripts/docs/flags_page.py
```

Every command prints its own flags with `--help`:

```bash
python -m trainer.cli.train_sft --help
```

Four rules hold for all flags:

- `--config FILE` reads flags from a YAML file. Flags that follow it on the command line override the file.
- Training takes the last value of a flag that is given more than once, and says so. The other commands refuse it.
- A flag that is switched on or off takes no value (`--no_save`), or `true` or `false`.
- A flag either works or is refused, with one line that says why and what to do instead.

[Flags that do not go together](#flags-that-do-not-go-together) are at the end of this page.
[Troubleshooting](troubleshooting.md) explains such lines.
"""
REFUSED = """## Flags that do not go together

A flag of this list is refused in the situation that follows it. The line then says why, and what to do instead.
A row that is about some values of its flag names them. Where a command lacks a flag, its rows do not matter.
N is a number, and other capitals stand for a value.
"""
WORD = re.compile(r"(?P<before>[(\"']*)(?P<core>\S*?)(?P<after>[)\"'.,;:]*)(?=\s|$)")


def groups() -> list[tuple[type, list[str]]]:
    """Every group of flags with the commands that have it, in the order of --help, those of most commands first."""
    found: dict[type, list[str]] = {}
    for name, command in COMMANDS.items():
        for kind in groups_of(command).values():
            found.setdefault(kind, []).append(name)
    return sorted(found.items(), key=lambda group: -len(group[1]))


def allowed_values(field: dataclasses.Field, hint) -> str:
    """What may follow a flag, in words."""
    kind, nargs = field.metadata["type"] or hint, field.metadata["kwargs"].get("nargs")
    if hint is bool:
        return "on or off"
    if isinstance(kind, str):
        return ALLOWED[kind]
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in typing.get_args(kind))
    what = {float: "a number", int: "an integer"}.get(kind, "a text")
    if nargs == 2:
        return f"two {what[2:]}s"
    if nargs == "+":
        return f"one {what[2:]} or more"
    return f"{what}, or no value" if nargs == "?" else what


def default_value(field: dataclasses.Field, hint) -> str:
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    if default is None:
        return "not set"
    if hint is bool:
        return "on" if default else "off"
    return f"`{' '.join(map(str, default)) if isinstance(default, list) else default}`"


def as_markdown(help_text: str) -> str:
    """A help text with flags, names and paths as code, and a lone * as itself."""

    def marked(word: re.Match) -> str:
        before, core, after = word.group("before", "core", "after")
        is_code = core.startswith("--") or "<" in core or (re.search("[a-z]_|_[a-z]", core, re.I) and "`" not in core)
        return before + (f"`{core}`" if is_code else core.replace("*", "\\*")) + after

    return WORD.sub(marked, help_text)


def entry(field: dataclasses.Field, hint) -> str:
    """One flag as an item of a list."""
    help_text = as_markdown(field.metadata["help"])
    lines = [f"- **`--{field.name}`** ({allowed_values(field, hint)}; default: {default_value(field, hint)})"]
    lines.append(f"  <br>{help_text}{'' if help_text.endswith('.') else '.'}")
    if field.metadata["aliases"]:
        lines.append(f"  <br>Other names: {', '.join(f'`--{name}`' for name in field.metadata['aliases'])}.")
    return "\n".join(lines)


def placeholders() -> dict[str, str]:
    """What stands for the value of a flag or fact in a rule: N for a number, else the last word of its name."""
    numbers = {name for name, value in UNKNOWN.items() if type(value) is int}
    names = set(UNKNOWN)
    for command in COMMANDS.values():
        for field, hint in flags_of(command):
            names.add(field.name)
            if "integer" in (kind := allowed_values(field, hint)) or "number" in kind:
                numbers.add(field.name)
    return {name: "N" if name in numbers else name.split("_")[-1].upper() for name in names}


def refusals(rules: Iterable[Rule]) -> str:
    """The rows of a table of rules as items of a list."""
    shown, values = {}, placeholders()  # two rows that read alike are shown once
    for rule in rules:
        texts = (rule.subject(), rule.against.format(**values), rule.why.format(**values), rule.instead)
        subject, against, why, instead = map(as_markdown, texts)
        shown[f"- {subject} {against}: {why}. {instead}"] = None
    return "\n".join(shown) + "\n"


def listed(names: Sequence[str]) -> str:
    """Names as code: `a`, `b` and `c`."""
    *first, last = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(first), last]))


def by_owners(tables: dict[str, tuple[Rule, ...]]) -> dict[tuple[str, ...], list[Rule]]:
    """The rules of several tables, by the names of the tables that have them. Those of most tables come first."""
    owners: dict[Rule, list[str]] = {}
    for name, rules in tables.items():
        for rule in rules:
            owners.setdefault(rule, []).append(name)
    found: dict[tuple[str, ...], list[Rule]] = {}
    for rule, names in owners.items():
        found.setdefault(tuple(names), []).append(rule)
    return dict(sorted(found.items(), key=lambda group: -len(group[0])))


def refused_pairs() -> str:
    """The section of the flags that do not go together."""
    parts = [REFUSED]
    for everything, prefix, tables in (("All commands", "", RULES), ("Both backends", "--backend ", BACKEND_RULES)):
        for names, rules in by_owners(tables).items():
            title = everything if len(names) == len(tables) else listed([prefix + name for name in names])
            parts.append(f"### {title}\n\n{refusals(rules)}")
    return "\n".join(parts)


def page() -> str:
    """The text of docs/flags.md."""
    parts = [HEAD]
    for base, commands in groups():
        title = base.__doc__.splitlines()[0]
        fields = dataclasses.fields(base)
        hints = typing.get_type_hints(base)
        which = "all commands" if len(commands) == len(COMMANDS) else listed(commands)
        parts.append(f"## {title}\n\nFlags of {which}.\n")
        parts.append("\n".join(entry(field, hints[field.name]) for field in fields) + "\n")
    return "\n".join([*parts, refused_pairs()])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")

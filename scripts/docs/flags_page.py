"""Write docs/flags.md, the list of all flags, from the dataclasses that the commands parse: `python scripts/docs/flags_page.py`."""

import dataclasses
import re
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from trainer.flags.parse_flags import ALLOWED, groups_of
from trainer.flags.rules import COMMANDS

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

Three rules hold for all flags:

- `--config FILE` reads flags from a YAML file. Flags that follow it on the command line override the file.
- A flag that is switched on or off takes no value (`--no_save`), or `true` or `false`.
- A flag either works or is refused, with one line that says what is allowed.

[Troubleshooting](troubleshooting.md) explains such lines.
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


def page() -> str:
    """The text of docs/flags.md."""
    parts = [HEAD]
    for base, commands in groups():
        title = base.__doc__.splitlines()[0]
        fields = dataclasses.fields(base)
        hints = typing.get_type_hints(base)
        *first, last = [f"`{command}`" for command in commands]
        which = (
            "all commands" if len(commands) == len(COMMANDS) else " and ".join(filter(None, [", ".join(first), last]))
        )
        parts.append(f"## {title}\n\nFlags of {which}.\n")
        parts.append("\n".join(entry(field, hints[field.name]) for field in fields) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")

"""Groups of flags: dataclasses of fields that `arg` makes. A command is a dataclass of groups, and its flags are flat."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from trainer.errors import without_secrets
from trainer.limits import DEFAULTS, HELP


def arg(default, help: str, *aliases: str, type=None, **kwargs):
    """Make a dataclass field with its help text, aliases (without dashes) and more keywords of `add_argument`."""
    metadata = {"help": help, "aliases": aliases, "type": type, "kwargs": kwargs}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def limits_flag():
    """The field of --limits. `raise_limits` reads its value, which no file of others may give."""
    return arg(None, HELP, type=str, nargs="+")


def of_table(name: str, text: str, type: str = "PositiveInt"):
    """The field of a flag whose default is limit `name`."""
    return arg(None, f"{text} (default: --limits {name}, {DEFAULTS[name][0]})", type=type)


def set_names(value: Any) -> Any:
    """The type of a flag with names of sets: a text, or a list in a file of --config. See `set_entries`."""
    if not isinstance(value, (str, list)):
        raise ValueError(f"Got value: {value}")
    return value


def group(kind: type):
    """Make the field of a command that holds a group of flags."""
    return dataclasses.field(default_factory=kind)


def some_flags(kind: type, names: str) -> type:
    """A group with only these flags of another one, in its order. `names` are separated by spaces."""
    wanted, hints = set(names.split()), typing.get_type_hints(kind)
    fields = [
        (
            f.name,
            hints[f.name],
            dataclasses.field(default=f.default, default_factory=f.default_factory, metadata=f.metadata),
        )
        for f in dataclasses.fields(kind)
        if f.name in wanted
    ]
    if missing := wanted - {name for name, *_ in fields}:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(missing))}")
    return dataclasses.make_dataclass(kind.__name__, fields, namespace={"__doc__": kind.__doc__})


def groups_of(command: type) -> dict[str, type]:
    """{attribute: dataclass of flags} of a command, in the order of --help."""
    return {field.name: field.default_factory for field in dataclasses.fields(command)}


def flags_of(command: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    """(field, type) of every flag of a command."""
    for kind in groups_of(command).values():
        hints = typing.get_type_hints(kind)
        yield from ((field, hints[field.name]) for field in dataclasses.fields(kind))


def flat(args) -> dict[str, Any]:
    """{flag: value} of a command's groups, in the order of --help. config.yaml and metrics.jsonl hold it."""
    return {name: value for own in vars(args).values() for name, value in vars(own).items()}


def public_flags(args) -> dict[str, Any]:
    """`flat`, with *** in place of the secrets of addresses: what files and trackers get."""
    return {name: without_secrets(value) for name, value in flat(args).items()}


def options_of_flags(kind: type, args, **others):
    """A `kind`, a dataclass whose fields are flags of these names. `others` are its fields that are no flags."""
    values = flat(args) | others
    return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})


def from_flat(command: type, values: dict[str, Any]):
    """The arguments of a command with these values. Flags that are not in `values` keep their defaults."""
    known = {field.name for field, _ in flags_of(command)}
    if unknown := values.keys() - known:
        raise TypeError(f"{command.__name__} has no {', '.join(sorted(unknown))}")
    made = {
        name: kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})
        for name, kind in groups_of(command).items()
    }
    return command(**made)


def with_flags(args, **values):
    """A copy of `args` with other values of some flags."""
    return from_flat(type(args), flat(args) | values)

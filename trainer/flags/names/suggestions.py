"""What to write instead of a name that is no flag: the table of other trainers first, then our commands, then spelling."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from trainer.flags.groups import flags_of
from trainer.flags.names.peer_names import ROWS, PeerName
from trainer.flags.rules import COMMANDS

CLOSE = 0.84  # of difflib's ratio: one or two letters differ. Below it, a name like another often means something else


def suggestion(name: str, command: str, known: Iterable[str]) -> str:
    """What to say about `name`, which `command` with the flags `known` lacks. A path of verl is "a.b.c"."""
    rows = rows_of(name) if command in COMMANDS else []  # the small commands have no counterparts elsewhere
    if here := [row for row in rows if command in row.commands]:
        return "; ".join(translation(row) for row in here)
    leaf = name.rpartition(".")[2]
    if leaf in known:
        return f"did you mean --{leaf}?"
    elsewhere = [f"{translation(row)} ({_of(row.commands)})" for row in rows]
    if owners := [other for other, kind in COMMANDS.items() if leaf in {field.name for field, _ in flags_of(kind)}]:
        elsewhere.append(f"--{leaf} is {_of(owners)}")
    if elsewhere:
        return "; ".join(elsewhere)
    nearest = difflib.get_close_matches(leaf, known, n=1, cutoff=CLOSE)
    return f"did you mean --{nearest[0]}?" if nearest else "see --help"


def rows_of(name: str) -> list[PeerName]:
    """The rows for a name. Of a path, the longest end that the table has decides: `critic.optim.lr` before `optim.lr`."""
    parts = name.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if found := [row for row in ROWS if end in row.names.split()]:
            return found
    return []


def translation(row: PeerName) -> str:
    """A row in words."""
    if not row.ours:
        return f"no counterpart: {row.words}"
    return f"{row.words}: {row.ours}" if row.words else row.ours


def leaves(values: dict[str, Any], known: Iterable[str], path: str = "") -> Iterator[str]:
    """The keys of a YAML mapping that are no flags. Those of nested mappings are paths, unless the table has the mapping."""
    for name, value in values.items():
        full = f"{path}{name}"
        if isinstance(value, dict) and value and not any(full in row.names.split() for row in ROWS):
            yield from leaves(value, (), f"{full}.")
        elif full not in known:
            yield full


def _of(commands: Iterable[str]) -> str:
    *first, last = commands
    return f"a flag of {' and '.join(filter(None, [', '.join(first), last]))}"

"""What to write instead of a name that is no flag: the table of other trainers first, then our commands, then spelling."""

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from trainer.errors import UserError
from trainer.flags.groups import flags_of
from trainer.flags.names.first_names import FIRST_NAMES, LIKE, SMALL_NAMES
from trainer.flags.names.method_names import METHOD_NAMES
from trainer.flags.names.peer_row import LEAVE_OUT, SFT, PeerName
from trainer.flags.names.training_names import TRAINING_NAMES
from trainer.flags.rules import COMMANDS
from trainer.metrics import counted

ROWS = (*TRAINING_NAMES, *METHOD_NAMES, *FIRST_NAMES)  # docs/coming_from.md is written from this table
# parts of a path under which a name means what it means alone; and parts that say that it is about something else
SECTIONS = frozenset([
    "actor", "adam", "advantage", "algo", "algorithm", "ckpt", "data", "ds", "env", "logger", "mixed_precision",
    "model", "optim", "reward", "rollout", "train", "trainer", "trl",
])  # fmt: skip
FOREIGN = frozenset([
    "critic", "ref", "reward_model", "reward_manager", "teacher", "val_kwargs", "profiler", "trace", "megatron",
    "vllm", "ebft",
])  # fmt: skip
GIVEN: Any = object()  # a value that is not known


def suggestion(name: str, command: str, known: Iterable[str], value: Any = GIVEN) -> str:
    """What to say about `name`, which `command` with the flags `known` lacks. A path of verl is "a.b.c"."""
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return "empty; leave it out"
    if command not in COMMANDS:
        return _of_small(name, command, known)
    exact = rows_of(name)
    if here := [row for row in exact if command in row.commands]:
        return _said(here, value)
    *path, leaf = name.split(".")
    means_leaf = not path or (path[-1] in SECTIONS and not FOREIGN.intersection(path))
    if means_leaf and leaf in known:  # a path of verl, or hyphens in place of underscores
        return f"did you mean --{leaf}?"
    elsewhere = [_elsewhere(row) for row in exact]
    if means_leaf and (owned := _owned(leaf)):
        elsewhere.append(owned)
    if elsewhere:
        return "; ".join(elsewhere)
    if not path and (nearest := misspelled(leaf, known)):
        return f"did you mean --{nearest}?"
    families = families_of(name)
    if here := [row for row in families if command in row.commands]:
        return _said(here, value)
    return "; ".join(map(_elsewhere, families)) or "see --help"


def _of_small(name: str, command: str, known: Iterable[str]) -> str:
    """`suggestion` for a command that does not train: names of its own, then rows whose flags it has, then spelling."""
    for names, ours in SMALL_NAMES.get(command, ()):
        if name in names.split():
            return ours
    known = set(known)
    rows = [row for row in rows_of(name) if LIKE.get(command, SFT) in row.commands]
    for row in rows:
        if (flags := _flags_in(row.ours)) and flags <= known:
            return translation(row) if _flags_in(row.words) <= known else row.ours
    if name not in known and (owned := _owned(name)):
        return owned
    nearest = name if name in known else misspelled(name, known)
    return f"did you mean --{nearest}?" if nearest else "see --help"


def _owned(name: str) -> str:
    """Which commands of training have this flag; empty if none has it."""
    owners = [other for other, kind in COMMANDS.items() if name in {field.name for field, _ in flags_of(kind)}]
    return f"--{name} is {_of(owners)}" if owners else ""


def no_such_flags(given: dict[str, Any], command: str, known: Iterable[str]) -> UserError:
    """The error for flags that `command` lacks, as they were typed, each with its value: what to write instead of each."""
    hints = [suggestion(name.lstrip("-").replace("-", "_"), command, known, value) for name, value in given.items()]
    if len(given) == 1:
        return UserError(*given, f"no such flag; {hints[0]}")
    return UserError(f"{counted(len(given), 'flag')} that {command} lacks", listed(list(given), hints))


def listed(names: list[str], hints: list[str]) -> str:
    return " | ".join(f"{name} -> {hint}" for name, hint in zip(names, hints))


def value_of(words: list[str], place: int) -> Any:
    """The value of a flag that the parser does not know: after its "=", or the next word."""
    _, is_joined, value = words[place].partition("=")
    following = words[place + 1 : place + 2]
    return value if is_joined else next((word for word in following if word[:1] != "-"), GIVEN)


def rows_of(name: str) -> list[PeerName]:
    """The rows for a name. Of a path, the longest end that the table has decides: `critic.optim.lr` before `optim.lr`."""
    for end in _ends(name):
        if found := [row for row in ROWS if end in row.names.split()]:
            return found
    return []


def families_of(name: str) -> list[PeerName]:
    """The rows that have `name` by a pattern such as vllm_*. Of several patterns, the longest decides."""
    for end in _ends(name):
        fits = [
            (pattern, row)
            for row in ROWS
            for pattern in row.names.split()
            if "*" in pattern and fnmatchcase(end, pattern)
        ]
        if fits:
            longest = max((pattern for pattern, _ in fits), key=len)
            return [row for pattern, row in fits if pattern == longest]
    return []


def translation(row: PeerName) -> str:
    """A row in words."""
    if not row.ours:
        return f"no counterpart: {row.words}"
    return f"{row.words}: {row.ours}" if row.words else row.ours


def misspelled(name: str, known: Iterable[str]) -> str:
    """The one flag that `name` differs from by a letter, or by two if it is long and begins alike. Else "".

    A name that is farther from a flag often means something else: --warmup_steps is not --max_steps.
    """
    plain = {flag: flag.replace("_", "") for flag in known}
    wanted = name.lower().replace("-", "").replace("_", "")
    for letters in (0, 1, 2):
        near = [flag for flag, text in plain.items() if _edits(wanted, text) == letters]
        if near and (letters < 2 or len(wanted) >= 10):
            near = [flag for flag in near if letters < 2 or flag[0] == name[0]]
            return near[0] if len(near) == 1 else ""
    return ""


def leaves(values: dict[str, Any], known: Iterable[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of a YAML mapping's keys that are no flags. Those of nested mappings are paths, unless the table has the mapping, and no section of verl has its name."""
    for name, value in values.items():
        full = f"{path}{name}"
        is_row = full not in SECTIONS and any(full in row.names.split() for row in ROWS)
        if isinstance(value, dict) and value and not is_row:
            yield from leaves(value, (), f"{full}.")
        elif full not in known:
            yield full, value


def _elsewhere(row: PeerName) -> str:
    """A row that is about other commands."""
    if row.ours:
        return f"{translation(row)} ({_of(row.commands)})"
    return f"not of this command; in {_joined(row.commands)} {translation(row)}"


def _flags_in(text: str) -> set[str]:
    return set(re.findall(r"--(\w+)", text))


def _said(rows: list[PeerName], value: Any) -> str:
    is_off = value is False or (isinstance(value, str) and value.lower() == "false")
    return "; ".join(_off(row) if is_off else translation(row) for row in rows)


def _off(row: PeerName) -> str:
    return f"{row.off}; true is {row.ours}" if row.ours and row.off == LEAVE_OUT else row.off


def _ends(name: str) -> Iterator[str]:
    """The ends of a path, the whole path first. All of them have what says that the name is about something else."""
    parts = name.split(".")
    foreign = [place for place, part in enumerate(parts[:-1]) if part in FOREIGN]
    last = min(foreign, default=len(parts) - 1)
    return (".".join(parts[start:]) for start in range(last + 1))


def _edits(one: str, other: str) -> int:
    """Letters to change, add, drop or swap between two texts (Damerau-Levenshtein, optimal string alignment); 3 or more is 3."""
    if abs(len(one) - len(other)) > 2:
        return 3
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return min(rows[-1][-1], 3)


def _of(commands: Iterable[str]) -> str:
    return f"a flag of {_joined(commands)}"


def _joined(names: Iterable[str]) -> str:
    *first, last = names
    return " and ".join(filter(None, [", ".join(first), last]))

"""A list of sets under `dataset:` in a file of --config, each with its path and flags of its own, as plain flags.

`spread` turns the list into --dataset, --dataset_probs and --dataset_flags, which a run writes into its config.yaml.
"""

import json
import math
import typing
from dataclasses import Field
from typing import Any, Optional

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.flags.names.own_flags import FLAGS_OF, MAX_SAMPLES, SPLIT, SPLIT_OF, read
from trainer.flags.names.suggestions import misspelled, suggestion
from trainer.metrics import counted

# what a set may have of its own: how its rows are read
OWN = (
    "input_key", "output_key", "prompt_key", "chosen_key", "rejected_key", "completion_key", "label_key", "margin_key",
    "input_template", "apply_chat_template", "train_on", "pretrain_mode", "ignore_columns", "system",
    SPLIT, MAX_SAMPLES,
)  # fmt: skip
PATH, WEIGHT = "path", "weight"
WEIGHTS_OF = {"dataset": "dataset_probs"}
ALLOWED = {bool: "true or false", Optional[int]: "a whole number above 0"}


def spread(values: dict[str, Any], command: str, fields: dict[str, tuple[Field, Any]]) -> dict[str, Any]:
    """`values` of flags, with a list of sets as plain flags. `fields`: {name: (field, type)} of the command.

    Raises UserError that names the set and its key for what is unknown or of another type.
    """
    for flag, own_flag in FLAGS_OF.items():
        if isinstance(values.get(flag), list):
            values = values | _of_list(values, flag, own_flag, command, fields)
        elif values.get(own_flag) is not None:
            own = read(values[own_flag], flag, values.get(flag))
            for number, (one, path) in enumerate(zip(own, names_in(values[flag])), 1):
                _check(one, f"--{own_flag} set {number} ({path})", flag, command, fields)
    return values


def _of_list(values: dict, flag: str, own_flag: str, command: str, fields: dict) -> dict[str, Any]:
    entries, weights_flag = values[flag], WEIGHTS_OF.get(flag)
    for name in filter(None, (own_flag, weights_flag)):
        if values.get(name) is not None:
            raise UserError(f"--{name}", f"with a list under {flag}:", f"{WEIGHT} and flags in its mappings")
    if not entries:
        raise UserError(f"{flag}:", "an empty list", "mappings with a path")
    paths, weights, own = [], [], []
    for number, entry in enumerate(entries, 1):
        entry = {PATH: entry} if isinstance(entry, str) else entry
        where = f"{flag}: set {number}"
        if not isinstance(entry, dict):
            raise UserError(where, repr(entry), "a mapping with a path")
        path = entry.get(PATH)
        if not isinstance(path, str) or not path.strip() or "," in path:
            found = f"no {PATH}" if path is None else f"{PATH} {path!r}"
            raise UserError(where, found, "one file, pattern, folder or hub name, without a comma")
        if WEIGHT in entry:
            weights.append(_weight(entry[WEIGHT], f"{where} ({path})", weights_flag))
        paths.append(path.strip())
        own.append({str(name): value for name, value in entry.items() if name not in (PATH, WEIGHT)})
        _check(own[-1], f"{where} ({path})", flag, command, fields, (PATH, *([WEIGHT] if weights_flag else [])))
    if weights and len(weights) != len(paths):
        raise UserError(
            f"{flag}:", f"{len(weights)} of {counted(len(paths), 'set')} have a {WEIGHT}", "a weight for each, or none"
        )
    found = {flag: ",".join(paths), own_flag: json.dumps(own, ensure_ascii=False)}
    return found | ({weights_flag: ",".join(map(repr, weights))} if weights else {})


def _weight(value: Any, where: str, weights_flag: str | None) -> float:
    if weights_flag is None:
        raise UserError(where, f"{WEIGHT} of a set that evaluates: all its rows count", "no weight")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(where, f"{WEIGHT} {value!r}", "a number above 0")
    return value


def _check(
    own: dict[str, Any], where: str, flag: str, command: str, fields: dict, others: tuple[str, ...] = ()
) -> None:
    """Raise UserError for a flag that a set of `flag` cannot have in `command`, or a value of another type."""
    known = [name for name in OWN if name == SPLIT or name in fields]
    for name, value in own.items():
        if name not in known:
            near = misspelled(name, (*others, *known))
            said = f"did you mean {near}?" if near else _elsewhere(name, command, fields)
            raise UserError(where, f"a set has no key {name}; {said}", ", ".join((*others, *known)))
        field, hint = fields[SPLIT_OF[flag] if name == SPLIT else name]
        choices = [one for kind in typing.get_args(hint) for one in typing.get_args(kind)]  # of Optional[Literal]
        allowed = ALLOWED.get(hint) or ", ".join(choices) or "a text"
        if hint == Optional[int]:
            is_of_type = type(value) is int and value > 0
        else:
            is_of_type = isinstance(value, bool if hint is bool else str) and value in (choices or [value])
        if not (is_of_type or (value is None and field.default is None)):
            raise UserError(where, f"{name} {value!r}", allowed)


def _elsewhere(name: str, command: str, fields: dict) -> str:
    """What to write instead of a name that is no misspelled key of a set."""
    if name in fields:
        return f"--{name} is for the whole run"
    return suggestion(name, command, fields)

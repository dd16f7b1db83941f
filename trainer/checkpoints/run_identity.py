"""The identity of a run: one record, readable and hashed, which each checkpoint holds and each resume compares.

The record has these parts:

- `flags`: every flag of the command.
- `content`: {flag: facts} of what flags name: the config, stop ids, code and frozen weights of models, the code of
  a reward, the targets of the data. Another fact is another objective.
- `versions` and `kernels`: of libraries, and what computes attention and matrix products. They change rounding only.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoints.resume_effects import EFFECT_OF, FIXED, OBJECTIVE, OUTPUT, SAMPLES, effect_of, in_effect
from trainer.errors import UserError

LATER = ("stop_ids", "image_processor", "remote_code", "rows")  # facts that older records lack: not compared then
NO_VALUE = "nothing"
SHOWN = 60  # characters of a value
RECORD_HASH = "blake2b"
# facts of a loader, and their flags: a position in the data means the same samples only with the same facts
POSITION_FLAGS = {
    "train_batch_size": "train_batch_size",
    "seed": "seed",
    "shuffle": "no_shuffle",
    "data": "dataset",
    "streaming_buffer": "streaming_buffer",
    "rollout_batch_size": "rollout_batch_size",
    "n_samples_per_prompt": "n_samples_per_prompt",
}


@dataclass(frozen=True)
class Change:
    """What is not as it was when the checkpoint was saved."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {shown(self.before)} -> {shown(self.now)}"


def shown(value: Any) -> str:
    """A value of a flag or config, short."""
    if isinstance(value, (list, tuple)) and not any(isinstance(own, (list, dict)) for own in value):
        text = " ".join(map(str, value))
    else:
        text = NO_VALUE if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record as JSON values, with its hash."""
    record = json.loads(json.dumps(record))
    return {**record, RECORD_HASH: _hash(record)}


def _hash(record: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def changes(folder: str, before: dict, now: dict, defaults: dict, allowed: Iterable[str]) -> list[Change]:
    """What changed since the checkpoint `folder`, whose record is `before`. The record of this run is `now`.

    `defaults` are the values of flags that an older record lacks. `allowed` are the flags of --allow_change.
    Raises UserError for a change of the objective that is not allowed.
    """
    if before[RECORD_HASH] == now[RECORD_HASH]:
        return []
    if before["command"] != now["command"]:
        found = f"{folder} is of {before['command']}, not of {now['command']}"
        raise UserError("--load_checkpoint", found, "a checkpoint of this command; --pretrain takes the model of any")
    given = {name: before["flags"].get(name, defaults[name]) for name in now["flags"]}
    old, new = in_effect(given), in_effect(now["flags"])
    flags = [
        Change(name, old[name], new[name])
        for name, value in now["flags"].items()
        if EFFECT_OF[name] != OUTPUT and not _same(given[name], value) and not _same(old[name], new[name])
    ]
    for change in flags:
        if EFFECT_OF[change.name] == FIXED:
            raise fixed(folder, change)
    contents = [change for flag in now["content"] for change in _of_content(flag, before, now)]
    strict = {OBJECTIVE, SAMPLES} if now["flags"].get("streaming") else {OBJECTIVE}  # no hash of all streamed samples
    refused = [c for c in flags if effect_of(c.name, old, new) in strict and c.name not in allowed]
    refused += [c for c in contents if c.name.split()[0] not in allowed]
    if refused:
        raise _refusal(folder, refused)
    others = [
        Change(name, before[part].get(name), value)
        for part in ("versions", "kernels")
        for name, value in {**dict.fromkeys(before[part]), **now[part]}.items()
        if before[part].get(name) != value
    ]
    return [*flags, *contents, *others]


def fixed(folder: str, change: Change) -> UserError:
    """The error for a flag with which the checkpoint does not fit the run."""
    if change.before is None:
        return UserError(
            f"--{change.name}", f"{folder} was saved without --{change.name}", f"no --{change.name}, or a new run"
        )
    found = f"{shown(change.now)}, but {folder} was trained with {shown(change.before)}"
    return UserError(f"--{change.name}", found, f"{shown(change.before)}, or a new run")


def _refusal(folder: str, refused: list[Change]) -> UserError:
    names = dict.fromkeys(change.name.split()[0] for change in refused)
    first, *more = refused
    found = f"{shown(first.now)} now, but {folder} was trained with {shown(first.before)}"
    found += "".join(f"; {c.name}: {shown(c.now)} now, {shown(c.before)} then" for c in more[:5])
    found += f"; and {len(more) - 5} more" * (len(more) > 5)
    return UserError(f"--{first.name}", found, f"what it was, or --allow_change {' '.join(names)}: another objective")


def _of_content(flag: str, before: dict, now: dict) -> list[Change]:
    """The facts of what `flag` names that are others, by name: "pretrain config rms_norm_eps"."""
    held = before["content"].get(flag) or {}
    facts = {name: value for name, value in now["content"][flag].items() if name not in LATER or name in held}
    old, new = dict(_leaves(flag, held)), dict(_leaves(flag, facts))
    return [Change(name, old.get(name), value) for name, value in {**dict.fromkeys(old), **new}.items()
            if not _same(old.get(name), value)]  # fmt: skip


def _leaves(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, own in value.items():
            yield from _leaves(f"{name} {key}", own)
    else:
        yield name, value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 and True differ, 1 and 1.0 do not, tuples and lists do not."""
    one, other = (
        json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True) for value in (one, other)
    )
    return one == other


def _number(text: str) -> float:
    return int(float(text)) if float(text).is_integer() else float(text)


@dataclass(frozen=True)
class Identity:
    """The record of this run, sealed, the default values of its flags, and the flags of --allow_change."""

    record: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()

    def compare(self, folder: str, state: dict, position_facts: dict) -> list[Change]:
        """What changed since the checkpoint `folder` with this state, which may be older than records are.

        `position_facts` are those of this run's loader. Raises UserError for a change that is not allowed.
        """
        before, now = state.get("arguments", {}), self.record["flags"]
        self._check_position(folder, state, before, position_facts)
        if "identity" in state:
            return changes(folder, state["identity"], self.record, self.defaults, self.allowed)
        old = [
            Change(name, before[name], now[name]) for name in ("lora_rank", "optim") if name in before and name in now
        ]
        for change in old:
            if not _same(change.before, change.now):
                raise fixed(folder, change)
        return []

    def _check_position(self, folder: str, state: dict, before: dict, facts: dict) -> None:
        """A position in the data means the same samples only if these facts are the same."""
        now = self.record["flags"]
        for key in facts.keys() & POSITION_FLAGS.keys():
            flag, old = POSITION_FLAGS[key], state["data"].get(key)
            if old == facts[key] or (flag in self.allowed and (key != "data" or not now.get("streaming"))):
                continue
            if key != "data":
                raise _refusal(folder, [Change(flag, before.get(flag, old), now.get(flag, facts[key]))])
            made = [n for n, value in now.items() if _makes_samples(n) and n in before and not _same(before[n], value)]
            if made and not now.get("streaming") and not set(made) - set(self.allowed):
                continue
            cause = "; ".join(f"--{name} was {shown(before[name])}, and is {shown(now[name])}" for name in made)
            cause = cause or "its rows, the tokenizer or the chat template are not as they were"
            allowed = f"what it was, or --allow_change {' '.join(made) or flag}: the position in the data stays"
            allowed = "what it was, or a new run" if now.get("streaming") else allowed
            raise UserError(f"--{flag}", f"other samples than {folder} was trained with: {cause}", allowed)


def _makes_samples(flag: str) -> bool:
    return EFFECT_OF[flag] == SAMPLES or flag in ("dataset", "max_eval_samples")

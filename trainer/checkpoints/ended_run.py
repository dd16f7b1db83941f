"""A run that has ended, and whose last step is in no checkpoint: a resume would train steps again. It imports no torch."""

import contextlib
import json
import os
from typing import Any, Optional

from trainer.checkpoints.checkpoint_store import list_checkpoints, step_of
from trainer.checkpoints.resume_effects import CONTENT, EFFECT_OF, FIXED, OBJECTIVE, SAMPLES, in_effect
from trainer.errors import NothingLeft, UserError
from trainer.limits import lines_of
from trainer.metrics import METRICS_FILE

LENGTH = ("max_steps", "max_epochs", "num_episodes", "early_stopping_patience")
MERGED = ("pretrain", "lora_adapter", "merge_adapter")  # a run with --merge_adapter writes others than it was given
BEGINNINGS = (b'{"event": "start"', b'{"event": "resume"')


def check_ended(folder: str, flags: dict[str, Any], saved: list[str]) -> None:
    """Raise NothingLeft if the run in `folder` has ended, its models are there, and its last step is in no checkpoint.

    `flags` are those of the command, flat. `saved` are the folders of its models. Raises UserError for flags that ask for
    another run, or for more steps.
    """
    ended = _end_of(folder)
    if ended is None or not saved or not all(map(os.path.isdir, saved)):
        return
    steps, before = ended
    checkpoints = list_checkpoints(os.path.join(folder, "checkpoints"))
    newest = max(map(step_of, checkpoints), default=0)
    if newest >= steps:  # the resume from there says how it ends
        return
    if others := _others(before, json.loads(json.dumps(flags)), steps):
        kept = f"whose last checkpoint is of step {newest}" if checkpoints else "without a checkpoint"
        found = f"{folder} holds a run that ended at step {steps}, {kept}. With other {', '.join(others)}"
        found += f", it would train steps again and replace {saved[0]}"
        instead = f"Train on with --pretrain {saved[0]} and another --output_dir."
        raise UserError("--load_checkpoint", found, instead=instead)
    raise NothingLeft(f"nothing left to do: the run ended at step {steps}, and {saved[0]} is its model")


def _others(before: dict[str, Any], now: dict[str, Any], steps: int) -> list[str]:
    """Flags with which this is not the run that has ended after `steps`."""
    if unknown := before.keys() - now.keys():
        return [f"flags (it had --{min(unknown)})"]
    old, new = in_effect({**now, **before}), in_effect(now)
    compared = {name for name in new if EFFECT_OF[name] in {FIXED, OBJECTIVE, CONTENT, SAMPLES}}
    compared -= set(MERGED) if now.get("merge_adapter") else set()
    if not 0 < (now["max_steps"] or 0) <= steps:
        compared |= now.keys() & set(LENGTH)
    return [f"--{name}" for name in new if name in compared and old[name] != new[name]]


def _end_of(folder: str) -> Optional[tuple[int, dict[str, Any]]]:
    """(the last step, the flags) of a run whose last row says that it ended; None for every other folder."""
    path, begin, line = os.path.join(folder, METRICS_FILE), b"", b""
    if not os.path.isfile(path):
        return None
    for line in lines_of(path, "--output_dir"):
        begin = line if line.startswith(BEGINNINGS) and b'"config": ' in line else begin
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # a row that was cut is no end
        end, flags = json.loads(line), json.loads(begin)["config"]
        if end["event"] == "end" and isinstance(end["steps"], int) and isinstance(flags, dict):
            return end["steps"], flags
    return None

"""Read the loss curves that other trainers log, as rows by step: {"loss", and if logged "grad_norm" and "lr"}.

Files: trainer_state.json (HF Trainer, TRL, axolotl, LLaMA-Factory), trainer_log.jsonl (LLaMA-Factory), the JSON lines of
verl, TensorBoard events and wandb's local files (all of them, OpenRLHF and NeMo-RL too). Printed text: torchtitan, verl,
NeMo-RL, HF Trainer.
"""

import ast
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import UserError

# the names of one thing in several trainers; the first that a log has counts
LOSS_KEYS = (
    "loss", "train/loss", "train/gpt_loss", "loss_metrics/global_avg_loss", "gpt_loss", "actor/pg_loss", "actor/loss",
    "train/policy_loss",
)  # fmt: skip
NORM_KEYS = ("grad_norm", "train/grad_norm", "actor/grad_norm")
LR_KEYS = ("lr", "learning_rate", "train/learning_rate", "train/lr", "actor/lr")
STEP_KEYS = ("step", "train/global_step", "trainer/global_step", "_step")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf)", re.IGNORECASE)
TORCHTITAN = re.compile(r"\bstep:\s*(\d+)\s+loss:\s*(\S+)(?:.*?grad_norm:\s*([-+.\de]+))?")
VERL = re.compile(r"\bstep:(\d+) - (.*)")
HF_DICT = re.compile(r"\{'loss': .*?\}")
NEMO_STEP, NEMO_LOSS = re.compile(r"=+ Step (\d+)/\d+ =+"), re.compile(r"• Loss: (\S+)")
# LevelDB's log format: https://github.com/google/leveldb/blob/main/doc/log_format.md
WANDB_BLOCK, WANDB_HEADER = 32768, 7


def read_foreign(path: Path) -> dict[int, dict] | None:
    """The rows of a log file or of a folder that another trainer wrote. None if `path` is none of these files."""
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".wandb":
        return rows_of(_wandb_histories(path))
    if ".tfevents." in path.name:
        return _tensorboard_rows(path)
    if path.suffix == ".json" and path.is_file():
        return _trainer_state_rows(path)
    if path.suffix == ".jsonl" and path.is_file():
        return _json_line_rows(path)
    return None


def _read_folder(folder: Path) -> dict[int, dict] | None:
    """Of several checkpoints, the one with the most steps counts. Of several runs of wandb, the last."""
    if (folder / "metrics.jsonl").exists():
        return None  # a run of this project
    states = [path for path in folder.glob("checkpoint-*/trainer_state.json") if path.parent.name[11:].isdecimal()]
    checkpoints = sorted(states, key=lambda path: int(path.parent.name[11:]))
    offline = sorted(folder.glob("**/*.wandb"))
    for candidates in ([folder / "trainer_state.json"], checkpoints, [folder / "trainer_log.jsonl"], offline):
        found = [path for path in candidates if path.is_file()]
        if found:
            rows = read_foreign(found[-1])
            if rows is None:
                raise UserError(str(found[-1]), "is not the log of a trainer: it is cut off or edited")
            return rows
    events = sorted(folder.glob("**/events.out.tfevents.*"))
    if events:
        return _tensorboard_rows(*(path for path in events if path.parent == events[-1].parent))
    allowed = "metrics.jsonl, trainer_state.json, trainer_log.jsonl, *.wandb or events.out.tfevents.*"
    raise UserError(str(folder), "holds no log that can be read", allowed)


def rows_of(histories: Iterator[tuple[int | None, dict]]) -> dict[int, dict]:
    """Rows by step from (step, values by name). A step of None is looked for among the values."""
    rows: dict[int, dict] = {}
    for step, values in histories:
        if not isinstance(values, dict):
            continue
        number = next((values[key] for key in STEP_KEYS if isinstance(values.get(key), int | float)), step)
        number = number if isinstance(number, int | float) and math.isfinite(number) else None
        row = {"loss": _first(values, LOSS_KEYS), "grad_norm": _first(values, NORM_KEYS), "lr": _first(values, LR_KEYS)}
        if number is not None and row["loss"] is not None:
            rows[int(number)] = row
    return rows


def _first(values: dict, keys: tuple[str, ...]) -> float | None:
    found = next((values[key] for key in keys if values.get(key) is not None), None)
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError):
        return None


# --- files


def _trainer_state_rows(path: Path) -> dict[int, dict] | None:
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        return rows_of((row.get("step"), row) for row in history if isinstance(row, dict))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _json_line_rows(path: Path) -> dict[int, dict] | None:
    """LLaMA-Factory: {"current_steps", "loss", "lr"}. verl's file logger: {"step", "data": {name: value}}."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return None
    if rows and all(isinstance(row, dict) and "current_steps" in row for row in rows):
        return rows_of((row["current_steps"], row) for row in rows)
    if rows and all(isinstance(row, dict) and isinstance(row.get("data"), dict) for row in rows):
        return rows_of((row.get("step"), row["data"]) for row in rows)
    return None


def _tensorboard_rows(*paths: Path) -> dict[int, dict]:
    try:
        # an optional package
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError(str(paths[0]), "tensorboard is not installed", "pip install -e '.[tensorboard]'") from None

    values: dict[int, dict] = {}
    for path in paths:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                values.setdefault(event.step, {})[tag] = event.value
        for tag in events.Tags()["tensors"]:  # newer writers store scalars as tensors
            for event in events.Tensors(tag):
                if event.tensor_proto.float_val:
                    values.setdefault(event.step, {})[tag] = event.tensor_proto.float_val[0]
    named = {step: {key: value for key, value in row.items() if key not in STEP_KEYS} for step, row in values.items()}
    return rows_of(iter(named.items()))


def _wandb_histories(path: Path) -> Iterator[tuple[int, dict]]:
    """The history of a run that wandb wrote to disk (WANDB_MODE=offline, or the copy of an online run)."""
    try:
        # optional packages
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError:
        raise UserError(str(path), "wandb is not installed", "pip install -e '.[wandb]'") from None

    for data in _leveldb_records(path):
        record, values = Record(), {}
        try:
            record.ParseFromString(data)
            for item in record.history.item:  # none, if it is another kind of record
                name = item.key or ".".join(item.nested_key)
                values[name] = json.loads(item.value_json) if item.value_json else None
        except (DecodeError, ValueError, RecursionError):
            raise UserError(str(path), "is a damaged file of wandb") from None
        yield record.history.step.num, values


def _leveldb_records(path: Path) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, in which each piece has a checksum, a length and a kind.

    wandb's file begins with 7 bytes of its own, ":W&B" among them. An incomplete end is skipped.
    """
    data, position, whole = path.read_bytes(), WANDB_HEADER, b""
    if data[:4] != b":W&B":
        raise UserError(str(path), "is not a file of wandb")
    while position + 7 <= len(data):
        if WANDB_BLOCK - position % WANDB_BLOCK < 7:  # the rest of a block is filled with zeros
            position += WANDB_BLOCK - position % WANDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        if len(piece) < length or kind not in (1, 2, 3, 4):
            return
        whole = piece if kind in (1, 2) else whole + piece  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            yield whole


# --- printed text


def foreign_text_rows(lines: list[str]) -> dict[int, dict]:
    """Rows of printed text without colours: torchtitan, verl, NeMo-RL, or the dictionaries of the HF Trainer.

    The HF Trainer prints no step. Its n-th line counts as step n.
    """
    for read in (_torchtitan_rows, _verl_rows, _nemo_rows, _hf_rows):
        rows = read(lines)
        if rows:
            return rows
    return {}


def _number(text: str | None) -> float | None:
    found = NUMBER.search(text or "")
    return float(found[0]) if found else None


def _torchtitan_rows(lines: list[str]) -> dict[int, dict]:
    found = [match for line in lines if (match := TORCHTITAN.search(line))]
    return {int(m[1]): {"loss": _number(m[2]), "grad_norm": _number(m[3]), "lr": None} for m in found}


def _verl_rows(lines: list[str]) -> dict[int, dict]:
    """verl prints `step:1 - actor/pg_loss:0.1 - ...`. Newer numpy adds its type: np.float64(0.1)."""

    def pairs() -> Iterator[tuple[int, dict]]:
        for match in filter(None, map(VERL.search, lines)):
            parts = (part.rpartition(":") for part in match[2].split(" - "))
            yield int(match[1]), {name.strip(): _number(value.replace("float64", "")) for name, _, value in parts}

    return rows_of(pairs())


def _nemo_rows(lines: list[str]) -> dict[int, dict]:
    """NeMo-RL prints a heading for each step, counted from 1 in each epoch, and the loss below it."""
    rows: dict[int, dict] = {}
    step = last = done = 0
    for line in lines:
        if heading := NEMO_STEP.search(line):
            if int(heading[1]) <= last:  # a new epoch
                done = step
            last = int(heading[1])
            step = done + last
        elif step and (loss := NEMO_LOSS.search(line)):
            rows[step] = {"loss": _number(loss[1]), "grad_norm": None, "lr": None}
    return rows


def _hf_rows(lines: list[str]) -> dict[int, dict]:
    rows: dict[int, dict] = {}
    for text in HF_DICT.findall("\n".join(lines)):
        try:
            values = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        rows |= rows_of([(len(rows) + 1, {key: value for key, value in values.items() if key != "step"})])
    return rows


def resolution(path: Path, rows: dict[int, dict]) -> float:
    """Half a unit of the last digit, if no loss of a log has more than 6 decimals; else 0. Such a log is rounded."""
    if not rows or os.path.isdir(path):
        return 0.0
    decimals = max(len(repr(row["loss"]).partition(".")[2]) for row in rows.values())
    return 0.5 * 10.0**-decimals if decimals <= 6 else 0.0

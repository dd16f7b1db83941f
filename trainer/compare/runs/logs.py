"""Read the loss curve of a run, from its metrics.jsonl, from the text that rank 0 printed, or from another trainer's log."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.runs.foreign_logs import foreign_text_rows, read_foreign, resolution
from trainer.errors import UserError
from trainer.reports.run_rows import up_to

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
STEP = re.compile(r"step\s+(\d+)/\d+")
# A space, bar or comma must follow a number. At the end of a killed run's log, 1.2 may be the start of 1.2345.
NUMBER = r"\s+([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?=[\s|,])"
LOSS = re.compile(r"\bloss" + NUMBER, re.IGNORECASE)
GRAD_NORM = re.compile(r"\bgrad_norm" + NUMBER, re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    loss: float
    grad_norm: float | None  # None: another trainer's log without it
    batch_hash: str | None = None  # None: a text log has no hash
    lr: float | None = None  # None: not in the log


@dataclass(frozen=True)
class Run:
    name: str
    steps: dict[int, Step]
    param_dtype: str | None = None  # from the configuration at the start of a metrics.jsonl
    rounding: float = 0.0  # half a unit of the last digit of a loss, if the log has rounded losses


def read_run(name: str, path: str | Path) -> Run:
    """Read the steps of one run, in order. If a step appears twice, the later row counts.

    `path` is a metrics.jsonl, a folder with a metrics.jsonl, a text log, or a file that `read_foreign` knows.
    Raises: UserError if the file is missing, empty or broken, or has no loss, or has a loss or gradient norm that is
    not finite.
    """
    path = Path(path)
    lines, is_own = [""], False
    try:
        rows = read_foreign(path)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from None
    if rows is None:
        path = path / "metrics.jsonl" if path.is_dir() else path
        lines = _read_lines(path)
        is_jsonl = path.suffix == ".jsonl" or lines[0].lstrip().startswith('{"')
        rows = _json_rows(path, lines) if is_jsonl else _text_rows(path, lines)
        is_own = bool(rows)
    if not rows:
        rows = foreign_text_rows([ANSI_COLOUR.sub("", line) for line in lines])
    if not rows:
        raise UserError(str(path), "holds no training step with a loss")
    steps = {step: _checked(path, step, rows[step], is_own) for step in sorted(rows)}
    return Run(name, steps, _param_dtype(lines[0]), 0.0 if is_own else resolution(path, rows))


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise UserError(str(path), "no such file", "a metrics.jsonl, a run folder with one, or a text log") from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}") from None
    if not text.strip():
        raise UserError(str(path), "is empty")
    return text.splitlines(keepends=True)


def _json_rows(path: Path, lines: list[str]) -> dict[int, dict]:
    rows = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        row = _parse_json(where, line)
        if row.get("event") in ("start", "resume"):  # later steps of an earlier start do not belong to this run
            rows = up_to(row.get("step", 0), rows)
        if "event" in row or ("loss" not in row and any(name.startswith("eval_") for name in row)):
            continue
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or "loss" not in row:
            raise UserError(where, "is neither event nor evaluation, and lacks a step number or a loss")
        rows[step] = row
    return rows


def _parse_json(where: str, line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, brackets without end
        torn = not line.endswith("\n")
        raise UserError(
            where, "is incomplete: the run was killed while it wrote this line" if torn else "is not JSON"
        ) from None
    if not isinstance(row, dict):
        raise UserError(where, "is not a JSON object")
    return row


def _param_dtype(first_line: str) -> str | None:
    try:
        return json.loads(first_line)["config"]["param_dtype"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # a text log, or a log that begins without an event


def _text_rows(path: Path, lines: list[str]) -> dict[int, dict]:
    """Find the steps between other printed text: progress bars, carriage returns, colours, evaluation lines."""
    rows = {}
    for line in lines:
        pieces = STEP.split(ANSI_COLOUR.sub("", line))  # before, step, after, step, after, ...
        for step, after in zip(pieces[1::2], pieces[2::2], strict=True):
            if loss := LOSS.search(after):
                grad_norm = GRAD_NORM.search(after)
                rows[int(step)] = {"loss": float(loss[1]), "grad_norm": float(grad_norm[1]) if grad_norm else None}
    return rows


def _checked(path: Path, step: int, row: dict, is_own: bool) -> Step:
    for key in ("loss", "grad_norm"):
        value = row.get(key)
        if value is None and key == "grad_norm" and not is_own:
            continue  # not every trainer logs it
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            found = f"no {key}" if value is None else f"{key} {value!r}, which is not a number"
            raise UserError(str(path), f"step {step} has {found}")
        if not math.isfinite(value):
            raise UserError(str(path), f"step {step} has {key} {value}, which is not finite")
    lr = row.get("lr")
    lr = float(lr) if isinstance(lr, (int, float)) and math.isfinite(lr) else None
    grad_norm = row.get("grad_norm")
    return Step(float(row["loss"]), None if grad_norm is None else float(grad_norm), row.get("batch_hash"), lr)

"""Read what a run has written so far, for people: its facts, its steps, its last samples. Nothing is written."""

import json
import os
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import UserError
from trainer.limits import lines_of
from trainer.metrics import METRICS_FILE, ROLLOUTS_FILE

TAIL_BYTES = 1 << 18  # enough for the last rollout samples; the file may hold gigabytes


@dataclass
class RunRows:
    """The content of a metrics.jsonl. A step that was repeated after a resume counts once, with its later values."""

    name: str
    folder: str
    start: dict[str, Any] = field(default_factory=dict)  # the row of the start: config, mesh, versions, data
    events: list[dict] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a finite number under `key`, and these numbers."""
        pairs = [(step, row[key]) for step, row in sorted(self.steps.items()) if is_number(row.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def keys(self) -> list[str]:
        """The names of all metrics that are numbers, in the order of their first row."""
        found = dict.fromkeys(key for row in self.steps.values() for key in row if is_number(row[key]))
        return [key for key in found if key != "step"]


def is_number(value) -> bool:
    """Whether a value can be plotted: finite, and below the numbers that broken files hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def read_rows(folder: str) -> RunRows:
    """Read a run folder, or its metrics.jsonl. The last line may be half written.

    Raises UserError if there is no such file, or if another line is no JSON object.
    """
    folder = folder.removesuffix(METRICS_FILE) or "."
    path = os.path.join(folder, METRICS_FILE)
    if not os.path.isfile(path):
        raise UserError("RUN", f"{folder} holds no {METRICS_FILE}", "the --output_dir of a run")
    run = RunRows(os.path.basename(os.path.abspath(folder)), folder)
    try:
        lines = [line.decode("utf-8", errors="replace") for line in lines_of(path, "RUN")]
    except OSError as error:
        raise UserError("RUN", f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            _add_event(run, row) if "event" in row else run.steps.setdefault(_step(row), {}).update(row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if line.endswith("\n"):
                raise UserError(
                    "RUN", f"{path} line {number} is no row of a run", "the file as it was written"
                ) from None
    return run


def _step(row: dict) -> int:
    if type(row["step"]) is not int or abs(row["step"]) >= 1 << 53:
        raise TypeError
    return row["step"]


def _add_event(run: RunRows, row: dict) -> None:
    """Drop steps of an earlier start that a later start or resume repeats."""
    if any(not isinstance(row.get(name) or {}, dict) for name in ("config", "mesh", "versions")):
        raise TypeError
    _step({"step": row.get("total_steps") or 0})
    run.events.append(row)
    if row["event"] == "start":
        run.start = row
    if row["event"] in ("start", "resume"):
        run.steps = up_to(_step({"step": 0, **row}), run.steps)


def up_to(last: int, steps: dict[int, dict]) -> dict[int, dict]:
    """The rows that stay when a run starts or resumes after step `last`. It repeats later steps."""
    return {step: row for step, row in steps.items() if step <= last}


def last_samples(folder: str, count: int) -> list[dict]:
    """The last samples of train_ppo: rows of rollouts.jsonl. Empty for other commands."""
    path = os.path.join(folder, ROLLOUTS_FILE)
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()[1:]  # the first one may be cut
    rows = []
    for line in lines[-count - 1 :]:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):  # the last one may be half written
            continue
    return [row for row in rows[-count:] if isinstance(row, dict)]


def describe(run: RunRows) -> dict[str, str]:
    """Facts of a run for its heading: command, model, layout, versions."""
    config, mesh = run.start.get("config") or {}, run.start.get("mesh") or {}
    facts = {"model": config.get("pretrain"), "data": config.get("dataset"), "backend": config.get("backend")}
    facts["mesh"] = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size and size != 1) or "1 rank"
    facts["dtype"], facts["seed"] = config.get("param_dtype"), config.get("seed")
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in (run.start.get("versions") or {}).items())
    return {name: str(value) for name, value in facts.items() if value is not None}

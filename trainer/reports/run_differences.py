"""Where runs first differ from the first run, for the report: data, loss, and a heat map of the gradients of step 1."""

import html
import math
import os

from trainer.reports.dump_files import GRADIENTS, NOISE, open_dump
from trainer.reports.run_rows import RunRows, is_number

LOSS_LIMITS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
NORM_LIMIT = 1e-4  # in fp32; rounding of bf16 and fp16 moves the norm too much to judge it
GRADIENT_LIMIT = 1e-4
FLOOR = 1e-9  # the lowest colour


def loss_limit(reference: RunRows, run: RunRows) -> float:
    """The relative difference that rounding explains, in the coarser dtype of the two runs."""
    return max(
        LOSS_LIMITS.get(str((one.start.get("config") or {}).get("param_dtype")), 1e-5) for one in (reference, run)
    )


def relative_differences(reference: RunRows, run: RunRows, key: str) -> dict[int, float]:
    """{step: relative difference of a metric}, for steps where both runs have a finite value that is not 0."""
    values = dict(zip(*reference.series(key), strict=True))
    pairs = zip(*run.series(key), strict=True)
    return {step: abs(value / values[step] - 1) for step, value in pairs if values.get(step)}


def difference_rows(runs: list[RunRows], differences: dict[str, dict[str, float]]) -> list[list[str]]:
    """A table: for each run after the first, the first step with other data, loss or gradient norm, and a tensor.

    The loss of RL with one update per rollout depends only on rewards and lengths, since its ratios are 1. Two runs
    with different weights can have the same loss to the last bit. So the gradient norm is shown too.
    """
    reference, rows = runs[0], [["", "other data from", "other loss from", "largest difference of the loss"]]
    rows[0] += ["other grad norm from", "first gradient of step 1 that differs"]
    for run in runs[1:]:
        both = [step for step in sorted(run.steps) if step in reference.steps]
        pairs = [(step, reference.steps[step], run.steps[step]) for step in both]
        data = next((step for step, a, b in pairs if a.get("batch_hash") != b.get("batch_hash")), None)
        limit, found = loss_limit(reference, run), relative_differences(reference, run, "loss")
        worst = max(found, key=found.get, default=None)
        row = [run.name, "no step" if data is None else f"step {data}", _from(pairs, "loss", limit)]
        row.append("no step in common" if worst is None else f"{found[worst]:.2g} at step {worst}")
        row.append(_from(pairs, "grad_norm", NORM_LIMIT) if limit == LOSS_LIMITS["fp32"] else "not judged")
        rows.append([*row, _first(differences.get(run.name))])
    return rows


def _from(pairs: list[tuple[int, dict, dict]], key: str, limit: float) -> str:
    step = next((step for step, a, b in pairs if not _is_close(a.get(key), b.get(key), limit)), None)
    return "no step" if step is None else f"step {step} (over {limit:g})"


def _is_close(reference, value, limit: float) -> bool:
    if not is_number(reference) or not is_number(value):
        return str(reference) == str(value)  # both are missing, or not finite in the same way
    return abs(value - reference) <= limit * abs(reference)


def _first(rels: dict[str, float] | None) -> str:
    if rels is None:
        return "no --parity_dump"
    found = next((name for name, rel in rels.items() if not rel <= GRADIENT_LIMIT), None)
    return "none" if found is None else f"{found}: {rels[found]:.2g} away"


def gradient_differences(runs: list[RunRows]) -> dict[str, dict[str, float]]:
    """{run: {tensor: ||g - g1|| / ||g1||}} against the first run, from --parity_dump. Rounding noise counts as 0.

    Runs without a dump, or with other tensors, are skipped. One tensor of each run is in memory at a time.
    """
    paths = {run.name: _dump_of(run) for run in runs}
    if not paths[runs[0].name]:
        return {}
    found: dict[str, dict[str, float]] = {}
    with open_dump(paths[runs[0].name]) as reference:
        names = sorted(reference.keys(), key=_in_model_order)
        norms = {name: reference.get_tensor(name).double().norm().item() for name in names}
        floor = NOISE * math.sqrt(sum(norm**2 for norm in norms.values()))
        for run in runs[1:]:
            if not paths[run.name]:
                continue
            with open_dump(paths[run.name]) as other:
                if set(other.keys()) != set(names) or any(_shape(other, n) != _shape(reference, n) for n in names):
                    continue
                found[run.name] = {}
                for name in names:
                    mine = reference.get_tensor(name).double()
                    distance = (other.get_tensor(name).double() - mine).norm().item()
                    noise = distance <= floor and norms[name] <= floor
                    found[run.name][name] = 0.0 if noise or not distance else distance / max(norms[name], 1e-300)
    return found


def _shape(file, name: str) -> list[int]:
    return file.get_slice(name).get_shape()


def _dump_of(run: RunRows) -> str | None:
    given = (run.start.get("config") or {}).get("parity_dump")
    folders = [os.path.join(run.folder, "parity"), *([given] if isinstance(given, str) else [])]
    paths = (os.path.join(folder, GRADIENTS) for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)


def _in_model_order(name: str) -> list:
    """A sort key: layer 10 comes after layer 9, the embedding is first, the last norm and the head are last."""
    parts = [int(part) if part.isdecimal() and len(part) < 10 else part for part in name.split(".")]
    place = 0 if "embed" in name else 1 if any(isinstance(part, int) for part in parts) else 2
    return [place, [(0, part, "") if isinstance(part, int) else (1, 0, part) for part in parts]]


def heat_map(differences: dict[str, dict[str, float]]) -> str:
    """Tensors x runs as an HTML table. The colour of a cell shows its difference on a logarithmic scale."""
    head = "".join(f"<th><pre>{html.escape(name)}</pre></th>" for name in differences)
    lines = [f"<tr><th></th>{head}</tr>"]
    for name in next(iter(differences.values())):
        cells = "".join(_cell(rels[name]) for rels in differences.values())
        lines.append(f"<tr><th><pre>{html.escape(name)}</pre></th>{cells}</tr>")
    return f"<div class='scroll tall'><table class=heat>{''.join(lines)}</table></div>"


def _cell(rel: float) -> str:
    """White up to FLOOR, blue up to the allowed difference, yellow to red above it."""
    if rel <= GRADIENT_LIMIT:
        share = math.log(max(rel, FLOOR) / FLOOR) / math.log(GRADIENT_LIMIT / FLOOR)
        colour = f"hsl(210 70% {98 - 22 * share:.0f}%)"
    else:
        share = min(1.0, math.log(rel / GRADIENT_LIMIT) / math.log(1 / GRADIENT_LIMIT))
        colour = f"hsl({55 - 50 * share:.0f} 95% {80 - 25 * share:.0f}%)"
    return f"<td style='background:{colour}'>{'0' if rel == 0 else f'{rel:.1e}'}</td>"

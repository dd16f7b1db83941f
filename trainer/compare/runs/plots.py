"""Plots of a comparison: loss curves, and relative differences on a logarithmic axis."""

import importlib.util
from pathlib import Path

from trainer.compare.runs.logs import Run
from trainer.compare.runs.parity import Comparison
from trainer.errors import UserError

FLOOR, CEILING = 1e-16, 1e2  # a logarithmic axis cannot show 0 or infinity: they are shown at its ends
MAX_LEGEND_ENTRIES = 10
KINDS = (
    ("loss", "tab:blue", "o"),
    ("grad norm", "tab:orange", "s"),
    ("gradient", "tab:green", "^"),
    ("weight", "tab:purple", "v"),
)


def require_matplotlib(flag: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(flag, "needs matplotlib, which is not installed", "pip install matplotlib")


def plot_comparisons(path: str | Path, runs: list[Run], comparisons: list[Comparison]) -> None:
    """Plot the loss curves, and below them the relative differences of loss and grad norm with the loss threshold."""
    from matplotlib.figure import Figure  # not needed for --help

    figure = Figure(figsize=(9, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _loss_curves(above, runs[0], runs[1:])
    for i, comparison in enumerate(comparisons):
        steps = [row.step for row in comparison.rows]
        colour = f"C{i % 10}"
        loss = [_clip(row.rel_loss) for row in comparison.rows]
        grad_norm = [float("nan") if row.rel_grad_norm is None else _clip(row.rel_grad_norm) for row in comparison.rows]
        below.plot(steps, loss, color=colour, marker=".", label=f"{comparison.name}: loss")
        below.plot(steps, grad_norm, color=colour, linestyle=":", label=f"{comparison.name}: grad norm")
    threshold = comparisons[0].thresholds.loss
    below.axhline(_clip(threshold), color="tab:red", linestyle="--", label=f"loss threshold {threshold:g}")
    below.set(yscale="log", xlabel="step", ylabel=f"relative difference from {runs[0].name}")
    below.grid(alpha=0.3)
    _legend(below, MAX_LEGEND_ENTRIES + 1)
    _save(figure, path)


def plot_matrix(path: str | Path, reference: Run, runs: list[Run], report: dict) -> None:
    """Plot all loss curves over the reference, and below them the largest differences, a row per configuration."""
    from matplotlib.figure import Figure  # not needed for --help

    entries = report["configurations"]
    heights = (3.5, 1.2 + 0.22 * len(entries))
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _loss_curves(above, reference, runs)
    above.set_xlabel("step")
    _difference_dots(below, entries)
    _threshold_lines(below, report["thresholds"])
    rels = [_largest(entry, kind) for entry in entries for kind, _, _ in KINDS]
    shown = rels + [value for values in report["thresholds"].values() for value in values.values()]
    shown = [_clip(value) for value in shown if value is not None]
    below.set(xscale="log", xlim=(min(shown) / 3, max(shown) * 3))  # set by hand: without any dot there is no autoscale
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize="small", frameon=False)
    _save(figure, path)


def _loss_curves(axes, reference: Run, runs: list[Run]) -> None:
    """Draw the reference as a wide pale line, so that curves that agree with it stay visible on top."""
    few = len(runs) <= MAX_LEGEND_ENTRIES
    curve = [step.loss for step in reference.steps.values()]
    axes.plot(list(reference.steps), curve, color="0.8", linewidth=7, label=reference.name)
    for i, run in enumerate(runs):
        label = run.name if few else f"{len(runs)} configurations" if i == 0 else None
        curve = [step.loss for step in run.steps.values()]
        axes.plot(list(run.steps), curve, color=f"C{i % 10}", linewidth=1, label=label)
    axes.set_ylabel("loss")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    _legend(axes, MAX_LEGEND_ENTRIES + 1)


def _legend(axes, max_entries: int) -> None:
    if len(axes.get_legend_handles_labels()[1]) <= max_entries:
        axes.legend(fontsize="small")


def _difference_dots(axes, entries: list[dict]) -> None:
    for kind, colour, marker in KINDS:
        points = [(_largest(entry, kind), row) for row, entry in enumerate(entries)]
        points = [(_clip(rel), row) for rel, row in points if rel is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=22, alpha=0.8, label=kind)
    names = [entry["name"] if entry["passed"] else f"FAIL {entry['name']}" for entry in entries]
    axes.set_yticks(range(len(entries)), names, fontsize="small", family="monospace")
    for tick, entry in zip(axes.get_yticklabels(), entries, strict=True):
        tick.set_color("black" if entry["passed"] else "tab:red")
    axes.set(ylim=(len(entries) - 0.5, -0.5), xlabel="largest relative difference from the reference")
    axes.grid(alpha=0.3)


def _largest(entry: dict, kind: str) -> float | None:
    if kind in ("loss", "grad norm"):
        return entry[f"max_rel_{kind.replace(' ', '_')}"]
    worst = entry[f"worst_{kind}"]
    return None if worst is None else worst["rel"]


def _threshold_lines(axes, thresholds: dict[str, dict]) -> None:
    """Draw a dashed line per threshold, in the colour of what it judges. Equal thresholds share one line."""
    colours = {"loss": "tab:blue", "grad_norm": "tab:orange", "dump": "tab:green"}
    names: dict[float, list[str]] = {}
    for values in thresholds.values():
        for key, value in values.items():
            if value is not None and key not in names.setdefault(value, []):
                names[value].append(key)
    for value, keys in names.items():
        label = f"{', '.join(keys).replace('_', ' ')} threshold {value:g}"
        axes.axvline(_clip(value), color=colours[keys[0]], linestyle="--", linewidth=1, label=label)


def _clip(rel: float) -> float:
    return min(max(abs(rel), FLOOR), CEILING)


def _save(figure, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(
            str(path), f"cannot be written: {' '.join(str(error).split())}", "a file such as out.png"
        ) from None

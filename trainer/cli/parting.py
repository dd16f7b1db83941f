"""Where runs part from the first one, for the report: data, loss and the gradients of step 1, as a table and a heat map."""

import html
import io
import math
import os

from trainer.cli.run_rows import RunRows

LOSS_LIMITS = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
GRADIENT_LIMIT = 1e-4
NOISE = 1e-6  # a gradient below this share of the norm of all gradients is rounding
FLOOR = 1e-9  # the lowest colour
GRADIENTS = "grads_step1.safetensors"


def parting_rows(runs: list[RunRows], differences: dict[str, dict[str, float]]) -> list[list[str]]:
    """A table: for each run after the first, the first step with other data, with another loss, and the first tensor."""
    reference, rows = runs[0], [["", "other data from", "other loss from", "first gradient of step 1 that differs"]]
    for run in runs[1:]:
        both = [step for step in sorted(run.steps) if step in reference.steps]
        pairs = [(step, reference.steps[step], run.steps[step]) for step in both]
        data = next((step for step, a, b in pairs if a.get("batch_hash") != b.get("batch_hash")), None)
        limit = max(
            LOSS_LIMITS.get(str(one.start.get("config", {}).get("param_dtype")), 1e-5) for one in (reference, run)
        )
        loss = next((step for step, a, b in pairs if not _is_close(a.get("loss"), b.get("loss"), limit)), None)
        loss_text = "no step" if loss is None else f"step {loss} (over {limit:g})"
        rows.append(
            [run.name, "no step" if data is None else f"step {data}", loss_text, _first(differences.get(run.name))]
        )
    return rows


def _is_close(reference, value, limit: float) -> bool:
    if reference is None or value is None:
        return reference is value
    return abs(value - reference) <= limit * abs(reference)


def _first(rels: dict[str, float] | None) -> str:
    if rels is None:
        return "no --parity_dump"
    found = next((name for name, rel in rels.items() if not rel <= GRADIENT_LIMIT), None)
    return "none" if found is None else f"{found}: {rels[found]:.2g} away"


def gradient_differences(runs: list[RunRows]) -> dict[str, dict[str, float]]:
    """{run: {tensor: ||g - g1|| / ||g1||}} against the first run, of the dumps of --parity_dump. Only rounding gives 0.

    Runs without a dump, or with other tensors, are left out. One tensor of each run is in memory at a time.
    """
    from safetensors import safe_open

    paths = {run.name: _dump_of(run) for run in runs}
    if not paths[runs[0].name]:
        return {}
    found: dict[str, dict[str, float]] = {}
    with safe_open(paths[runs[0].name], framework="pt") as reference:
        names = sorted(reference.keys(), key=_in_model_order)
        norms = {name: reference.get_tensor(name).double().norm().item() for name in names}
        floor = NOISE * math.sqrt(sum(norm**2 for norm in norms.values()))
        for run in runs[1:]:
            if not paths[run.name]:
                continue
            with safe_open(paths[run.name], framework="pt") as other:
                if set(other.keys()) != set(names):
                    continue
                found[run.name] = {}
                for name in names:
                    mine = reference.get_tensor(name).double()
                    distance = (other.get_tensor(name).double() - mine).norm().item()
                    noise = distance <= floor and norms[name] <= floor
                    found[run.name][name] = 0.0 if noise or not distance else distance / max(norms[name], 1e-300)
    return found


def _dump_of(run: RunRows) -> str | None:
    given = run.start.get("config", {}).get("parity_dump")
    folders = [os.path.join(run.folder, "parity"), *([given] if given else [])]
    paths = (os.path.join(folder, GRADIENTS) for folder in folders)
    return next((path for path in paths if os.path.isfile(path)), None)


def _in_model_order(name: str) -> list:
    """Layer 10 comes after layer 9; the embedding is first, the last norm and the head are last."""
    parts = [int(part) if part.isdigit() else part for part in name.split(".")]
    place = 0 if "embed" in name else 1 if any(isinstance(part, int) for part in parts) else 2
    return [place, [(0, part, "") if isinstance(part, int) else (1, 0, part) for part in parts]]


def heat_map(differences: dict[str, dict[str, float]], reference: str) -> str:
    """Runs x tensors as SVG. The colour is the difference of the gradient of step 1, on a logarithmic scale."""
    import matplotlib as mpl
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    names = list(next(iter(differences.values())))
    values = [[max(min(rels[name], 1.0), FLOOR) for rels in differences.values()] for name in names]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "heat map"}):
        figure = Figure(figsize=(3.6 + 0.5 * len(differences), 1.6 + 0.17 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.pcolormesh(values, norm=LogNorm(FLOOR, 1.0), cmap="magma")
        axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=6)
        axes.set_xticks([i + 0.5 for i in range(len(differences))], list(differences), fontsize=7, rotation=90)
        axes.invert_yaxis()
        axes.set_title(f"gradients of step 1, relative difference from {reference}", fontsize=8, loc="left")
        figure.colorbar(image, ax=axes).ax.axhline(GRADIENT_LIMIT, color="tab:cyan")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    label = html.escape(f"heat map of {len(names)} gradients in {len(differences)} runs")
    return f"<figure class=scroll style='margin:0' role=img aria-label='{label}'>{drawn}</figure>"

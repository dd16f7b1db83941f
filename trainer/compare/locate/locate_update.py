"""The phases of `locate` after the backward pass: gradients, gradient norm, optimizer state, weights.

The optimizer's state comes from the checkpoint of step 1, if both runs have one.
"""

import math
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.checkpoints.checkpoint_store import list_checkpoints
from trainer.checkpoints.shards import ShardReader
from trainer.compare.locate.traced_pair import (
    ROUNDOFF,
    Finding,
    Pair,
    PhaseResult,
    TracedRun,
    check_shapes,
    constant_ratio,
    describe_shard,
)
from trainer.compare.runs.dumps import global_norm
from trainer.metrics import counted
from trainer.reports.dump_files import GRADIENTS, WEIGHTS

GRADIENT, GRADIENT_FLOOR = 16.0, 4.0
ADAM_STEP = 2e-3  # of a full step of Adam
MOMENT = 1e-4  # of a moment: clean pairs differ by 2e-7, and moments rounded to bf16 by 1e-3
ADAM_EPS = 1e-8  # of create_optimizer


def gradients(pair: Pair) -> PhaseResult:
    """Gradients of the weights, in the order in which the backward pass reaches their modules."""
    files = pair.a.dump / GRADIENTS, pair.b.dump / GRADIENTS
    total, allowed = global_norm(files[0]), pair.allowed(pair.num_places, GRADIENT)
    floor = GRADIENT_FLOOR * pair.roundoff * total
    finding, worst, before, ratios = None, 0.0, "", {}
    with safe_open(files[0], framework="pt") as a, safe_open(files[1], framework="pt") as b:
        there = set(b.keys())
        names = in_backward_order(sorted(set(a.keys()) | there), pair.modules)
        for name in names:
            x = a.get_tensor(name).double() if name in a.keys() else None  # noqa: SIM118
            y = b.get_tensor(name).double() if name in there else None
            x = torch.zeros_like(y) if x is None else x
            y = torch.zeros_like(x) if y is None else y
            check_shapes(pair.b, name, x, y)
            size, norm = (y - x).norm().item(), x.norm().item()
            bound = allowed * norm + floor
            worst = max(worst, size / bound if bound and math.isfinite(size) else math.inf if size else 0.0)
            if size <= bound:
                before = before if finding else name
                continue
            ratios[name] = constant_ratio(x, y, allowed)
            rel = size / norm if norm else math.inf
            if finding is None:
                finding = Finding("gradients", name, rel, bound / norm if norm else 0.0, before, ratios[name])
                finding.features = describe_shard(x, y, allowed, pair)
            else:
                finding.others.append(name)
    if finding:
        finding.tokens = f"{len(ratios)} of {counted(len(names), 'tensor')}"
    return PhaseResult("gradients", len(names), worst, finding)


def in_backward_order(names: list[str], modules: list[str]) -> list[str]:
    """Parameters by the place of their module in the backward pass. A container counts where it ends."""
    place = {name: number for number, name in enumerate(modules)}
    return sorted(names, key=lambda name: (-place.get(name.rpartition(".")[0], -1), name))


def gradient_norm(pair: Pair) -> PhaseResult:
    """The gradient norm that each run reports, divided by the norm of the gradients in its dump."""
    ratios, allowed = [], 1e-4 if pair.roundoff <= ROUNDOFF["fp32"] else 4 * pair.roundoff
    for run in (pair.a, pair.b):
        norm = global_norm(run.dump / GRADIENTS)
        ratios.append(run.row["grad_norm"] / norm if run.row and norm else 1.0)
    rel = abs(ratios[1] / ratios[0] - 1) if math.isfinite(sum(ratios)) and ratios[0] else math.inf
    finding = None
    if not rel <= allowed:
        finding = Finding("gradient norm", "gradient norm", rel, allowed, ratio=ratios[1] / ratios[0])
        ratio_words = (f"{run.name} reports {x:.4g} times its own" for run, x in zip((pair.a, pair.b), ratios))
        finding.tokens = ", ".join(ratio_words)
    return PhaseResult("gradient norm", 1, rel / allowed, finding)


def optimizer_state(pair: Pair) -> PhaseResult | None:
    """The difference of moments that gradients do not explain. None without checkpoints of step 1.

    Adam's first moments are (1 - beta_1) g and (1 - beta_2) g^2, where g is the clipped gradient. So other betas or
    another clipping are explained, if the flags say so. States of other optimizers may differ as much as gradients.
    """
    runs = (pair.a, pair.b)
    folders = [_first_checkpoint(run.folder) for run in runs]
    if None in folders:
        return None
    readers = [ShardReader(str(folder)) for folder in folders]
    names = [{key for key in reader.shapes if not key.startswith("weight/") and "/" in key} for reader in readers]
    finding, worst, before, wrong = None, 0.0, "", []
    with (
        safe_open(pair.a.dump / GRADIENTS, framework="pt") as a,
        safe_open(pair.b.dump / GRADIENTS, framework="pt") as b,
    ):
        for key in sorted(names[0] | names[1]):
            kind, _, name = key.partition("/")
            if key not in names[0] & names[1]:
                rel, allowed, x, y = math.inf, 0.0, None, None
            else:
                x, y = (reader.read_full(key).double() for reader in readers)
                check_shapes(pair.b, key, x, y)
                expected = [_moment(run, file, kind, name) for run, file in zip(runs, (a, b), strict=True)]
                is_adam = all(value is not None for value in expected)
                allowed = MOMENT if is_adam else pair.allowed(pair.num_places, GRADIENT)
                rest = (y - x) - (expected[1] - expected[0]) if is_adam else y - x
                unit = max(x.norm().item(), 1e-30)
                rel = rest.norm().item() / unit if rest.isfinite().all() else math.inf
            worst = max(worst, rel / allowed if allowed else math.inf)
            if rel <= allowed:
                before = before if finding else key
                continue
            wrong.append(key)
            if finding is None:
                ratio = None if x is None else constant_ratio(x, y, allowed)
                finding = Finding("optimizer state", key, rel, allowed, before, ratio)
                finding.features = "" if x is None else describe_shard(x, x + rest, allowed, pair)
    if finding:
        finding.others, finding.tokens = wrong[1:], f"{len(wrong)} of {counted(len(names[0] | names[1]), 'tensor')}"
    return PhaseResult("optimizer state", len(names[0] | names[1]), worst, finding)


def _first_checkpoint(folder: Path) -> Path | None:
    found = [Path(path) for path in list_checkpoints(str(folder / "checkpoints"))]
    return next((path for path in found if path.name == "step_1"), None)


def _moment(run: TracedRun, gradients, kind: str, name: str) -> torch.Tensor | None:
    """AdamW's moment after one step. None for other optimizers, and for tensors without a gradient in the dump."""
    powers = {"exp_avg": 1, "exp_avg_sq": 2}
    gradient = _clipped(run, gradients, name) if run.facts["optim"] == "adamw" and kind in powers else None
    return None if gradient is None else (1 - run.facts["betas"][powers[kind] - 1]) * gradient ** powers[kind]


def weights(pair: Pair) -> PhaseResult:
    """The difference of weights that gradients do not explain, as a share of a full step of Adam.

    Adam's first step is lr * g / (|g| + eps), where g is the clipped gradient. For other optimizers, the relative
    difference of the weights counts.
    """
    runs = (pair.a, pair.b)
    is_adam = all(run.row and run.facts["optim"] == "adamw" for run in runs)
    lr = max(run.row["lr"] for run in runs) if is_adam else 0.0
    allowed = ADAM_STEP if is_adam and lr else max(1e-4, 4 * pair.roundoff)
    finding, worst, before, others = None, 0.0, "", []
    opened = [safe_open(run.dump / name, framework="pt") for run in runs for name in (WEIGHTS, GRADIENTS)]
    there = [set(opened[number].keys()) for number in (0, 2)]
    names = sorted(there[0] | there[1])
    for name in in_backward_order(names, pair.modules)[::-1]:
        if name not in there[0] & there[1]:  # a weight that one run lacks
            worst, finding = math.inf, finding or Finding("weights", name, math.inf, allowed, before)
            others += [name] if finding.where != name else []
            continue
        weights = [opened[number].get_tensor(name).double() for number in (0, 2)]
        check_shapes(pair.b, name, *weights)
        rest, unit = weights[1] - weights[0], weights[0].norm().item()
        if is_adam and lr:
            steps = [_adam_step(run, opened[number], name) for run, number in zip(runs, (1, 3))]
            if all(step is not None for step in steps):
                rest = rest + steps[1] - steps[0]
                unit = lr * math.sqrt(rest.numel())
        rounding = 8 * ROUNDOFF["fp32"] * weights[0].norm().item()
        size = max(0.0, rest.norm().item() - rounding) if rest.isfinite().all() else math.inf
        rel = size / unit if unit else 0.0 if not size else math.inf
        worst = max(worst, rel / allowed)
        if rel <= allowed:
            before = before if finding else name
        elif finding is None:
            finding = Finding("weights", name, rel, allowed, before)
            finding.features = describe_shard(weights[0], weights[0] + rest, 1e-9, pair)
        else:
            others.append(name)
    if finding:
        finding.others, finding.tokens = others, f"{len(others) + 1} of {counted(len(names), 'tensor')}"
    return PhaseResult("weights", len(names), worst, finding)


def _clipped(run: TracedRun, gradients, name: str) -> torch.Tensor | None:
    if name not in gradients.keys() or not run.row:  # noqa: SIM118
        return None
    limit = run.facts["max_norm"] or math.inf
    return gradients.get_tensor(name).double() * min(1.0, limit / (run.row["grad_norm"] + 1e-6))


def _adam_step(run: TracedRun, gradients, name: str) -> torch.Tensor | None:
    gradient = _clipped(run, gradients, name)
    return None if gradient is None else run.row["lr"] * gradient / (gradient.abs() + ADAM_EPS)

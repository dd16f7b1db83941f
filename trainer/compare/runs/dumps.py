"""Compare two folders written by --parity_dump, tensor by tensor: gradients of step 1, weights after the last step."""

import math
from pathlib import Path

from trainer.compare.runs.parity import Comparison, judge
from trainer.errors import UserError
from trainer.reports.dump_files import GRADIENTS, NOISE, WEIGHTS, open_dump

CHUNK = 1 << 22  # elements; a float64 copy of a whole embedding would need the most memory


def add_dumps(comparison: Comparison, reference_dir: str | Path, run_dir: str | Path) -> None:
    """Compare both dumps. Note the worst gradient and weight, and a failure if one is over the threshold.

    Adam divides a gradient by its own size, so noise gets full updates. Where the gradient is noise, a difference of
    weights that such updates explain (`comparison.max_update`) does not count.
    Raises: UserError if a file is missing or broken, or if the two files do not hold the same tensors.
    """
    threshold = comparison.thresholds.dump
    gradients, others = Path(reference_dir) / GRADIENTS, Path(run_dir) / GRADIENTS
    comparison.worst_gradient, comparison.noise = compare_gradients(gradients, others)
    floor = NOISE * global_norm(gradients)
    with open_dump(gradients) as a, open_dump(others) as b:
        known = set(a.keys()) & set(b.keys())

        def is_noise(name: str):
            if name not in known:
                return None
            elements = _noise_elements(a.get_tensor(name), b.get_tensor(name), floor, threshold)
            factor = is_noise(name.replace(".lora_A.", ".lora_B.")) if ".lora_A." in name else None
            # B begins at 0, so A's first gradient is proportional to B's first update, and is noise where that is
            return elements if factor is None else elements | factor.any(dim=0)[:, None]  # B: (outputs, rank)

        files = Path(reference_dir) / WEIGHTS, Path(run_dir) / WEIGHTS
        comparison.worst_weight = compare_files(*files, is_noise, comparison.max_update or 0.0)
    for kind, worst in (("gradient", comparison.worst_gradient), ("weight", comparison.worst_weight)):
        judge(comparison, f"the {kind} of {worst['name']}", worst["rel"], threshold)


def compare_gradients(reference: Path, other: Path) -> tuple[dict, dict[str, float]]:
    """({"name", "rel"} of the worst gradient, {name: size} of the gradients that are noise in both files).

    A size is a fraction of the norm of all gradients of the reference.
    """
    total = global_norm(reference)
    with open_dump(reference) as a, open_dump(other) as b:
        names = _same_names(reference, _with_gradient(a, b), other, _with_gradient(b, a))
        sizes = {name: max(_norm(a.get_tensor(name)), _norm(b.get_tensor(name))) for name in names}
        noise = {name: size / total for name, size in sizes.items() if 0 < size <= NOISE * total < math.inf}
        judged = [name for name in names if name not in noise]
        rels = {name: _rel(other, name, a.get_tensor(name), b.get_tensor(name)) for name in judged}
    worst = max(rels, key=rels.get)
    return {"name": worst, "rel": rels[worst]}, noise


def compare_files(reference: Path, other: Path, noise=None, max_update: float = 0.0) -> dict:
    """{"name", "rel"} of the tensor with the largest ||other - reference|| / ||reference||, in float64.

    `noise` takes a name and says which elements have noise for a gradient. A difference of such elements up to
    `max_update` does not count.
    """
    with open_dump(reference) as a, open_dump(other) as b:
        names = _same_names(reference, set(a.keys()), other, set(b.keys()))
        rels = {}
        for name in names:
            x, y = a.get_tensor(name), b.get_tensor(name)
            elements = noise(name) if noise else None
            if elements is not None and x.shape == y.shape:
                y = y.where(~(elements & ((y - x).abs() <= max_update)), x)
            rels[name] = _rel(other, name, x, y)
    worst = max(rels, key=rels.get)
    return {"name": worst, "rel": rels[worst]}


def _with_gradient(file, other) -> set[str]:
    """The tensors of a file, without zeros that the other file lacks: zeros and no gradient are the same."""
    there = set(other.keys())
    return {name for name in file.keys() if name in there or file.get_tensor(name).count_nonzero()}  # noqa: SIM118


def global_norm(file: Path) -> float:
    with open_dump(file) as tensors:
        return math.sqrt(sum(_norm(tensors.get_tensor(name)) ** 2 for name in tensors.keys()))  # noqa: SIM118


def _norm(tensor) -> float:
    return math.sqrt(sum(part.double().square().sum().item() for part in tensor.flatten().split(CHUNK)))


def _noise_elements(a, b, floor: float, threshold: float | None):
    """Which elements have a gradient that is noise in both files, and not exactly zero in both.

    All elements of a tensor with a norm up to `floor`. In other tensors, elements up to their share of the floor, or
    below `threshold` of the tensor's root mean square. So the bias of keys is found in a tensor with the biases of
    queries, keys and values. Tensors are compared to `threshold` of their norm. An element below it is unknown, even
    its sign, and Adam still makes updates of full size from it.
    """
    largest, norm = a.abs().maximum(b.abs()), max(_norm(a), _norm(b))
    if norm <= floor:
        return largest > 0
    return (largest > 0) & (largest <= max(floor, (threshold or 0.0) * norm) / math.sqrt(a.numel()))


def _same_names(reference: Path, expected: set[str], other: Path, found: set[str]) -> list[str]:
    if missing := expected - found:
        raise UserError(str(other), f"lacks {_listed(missing)}", f"the tensors of {reference}")
    if extra := found - expected:
        raise UserError(str(other), f"holds {_listed(extra)} in addition", f"the tensors of {reference}")
    if not expected:
        raise UserError(str(reference), "holds no tensor")
    return sorted(expected)


def _listed(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:5])
    return first + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _rel(other: Path, name: str, a, b) -> float:
    """||b - a|| / ||a||; 0 if both are all zeros, infinite if only a is."""
    if a.shape != b.shape:
        raise UserError(str(other), f"{name} has shape {tuple(b.shape)}", f"{tuple(a.shape)}")
    difference = norm = 0.0
    for x, y in zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True):
        x, y = x.double(), y.double()
        difference += (y - x).square().sum().item()
        norm += x.square().sum().item()
    if not math.isfinite(difference + norm):
        raise UserError(str(other), f"{name} is not finite in this file or in the reference")
    if difference == 0.0:
        return 0.0
    return math.sqrt(difference / norm) if norm else math.inf

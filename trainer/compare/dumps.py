"""Compare two folders written by --parity_dump, tensor by tensor: gradients of step 1, weights after the last step."""

import math
from pathlib import Path

from trainer.compare.parity import Comparison, judge
from trainer.errors import UserError

GRADIENTS = "grads_step1.safetensors"
WEIGHTS = "weights_final.safetensors"
CHUNK = 1 << 22  # elements; a float64 copy of a whole embedding would need the most memory


def add_dumps(comparison: Comparison, reference_dir: str | Path, run_dir: str | Path) -> None:
    """Compare both dumps. Note the worst gradient and weight, and a failure if one is over the threshold.

    Raises: UserError if a file is missing or broken, or if the two files do not hold the same tensors.
    """
    threshold = comparison.thresholds.dump
    comparison.worst_gradient = compare_files(Path(reference_dir) / GRADIENTS, Path(run_dir) / GRADIENTS)
    comparison.worst_weight = compare_files(Path(reference_dir) / WEIGHTS, Path(run_dir) / WEIGHTS)
    for kind, worst in (("gradient", comparison.worst_gradient), ("weight", comparison.worst_weight)):
        judge(comparison, f"the {kind} of {worst['name']}", worst["rel"], threshold)


def compare_files(reference: Path, other: Path) -> dict:
    """{"name", "rel"} of the tensor with the largest ||other - reference|| / ||reference||, in float64."""
    with _open(reference) as a, _open(other) as b:
        names = _same_names(reference, set(a.keys()), other, set(b.keys()))
        rels = {name: _rel(other, name, a.get_tensor(name), b.get_tensor(name)) for name in names}
    worst = max(rels, key=rels.get)
    return {"name": worst, "rel": rels[worst]}


def _open(path: Path):
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UserError(str(path), "no such file", "a dump written by --parity_dump")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), f"cannot be read as safetensors: {error}") from None


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

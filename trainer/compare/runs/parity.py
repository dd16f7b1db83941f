"""Compare the loss curves of a run and a reference: differences, bias, thresholds, and whether the run passed."""

import math
import statistics
from dataclasses import dataclass, field

from trainer.compare.runs.logs import Run, Step
from trainer.errors import UserError
from trainer.metrics import counted

MIN_STEPS_FOR_BIAS = 10


@dataclass(frozen=True)
class Thresholds:
    """Largest allowed relative differences. None: reported, but not judged."""

    loss: float
    grad_norm: float | None
    dump: float | None


@dataclass(frozen=True)
class Row:
    """One step of both runs. Relative differences are signed: positive if the run is above the reference."""

    step: int
    reference_loss: float
    loss: float
    rel_loss: float
    reference_grad_norm: float | None
    grad_norm: float | None
    rel_grad_norm: float | None  # None: one of the logs has no gradient norm


@dataclass
class Comparison:
    name: str
    reference: str
    rows: list[Row]
    thresholds: Thresholds
    batch_hash_equal: bool | None  # None: not in both logs
    mean_signed_rel_loss: float
    biased: bool | None  # None: too few steps to decide
    max_update: float | None = None  # the largest difference of two weights that noise explains; None: lr not logged
    worst_gradient: dict | None = None  # {"name", "rel"}, from the parity dumps
    worst_weight: dict | None = None
    noise: dict[str, float] = field(default_factory=dict)  # gradients not judged: name, and share of the global norm
    failures: list[str] = field(default_factory=list)

    @property
    def worst_loss(self) -> Row:
        return max(self.rows, key=lambda row: abs(row.rel_loss))

    @property
    def worst_grad_norm(self) -> Row | None:
        rows = [row for row in self.rows if row.rel_grad_norm is not None]
        return max(rows, key=lambda row: abs(row.rel_grad_norm), default=None)

    @property
    def passed(self) -> bool:
        return not self.failures


def compare_runs(reference: Run, run: Run, thresholds: Thresholds) -> Comparison:
    """Compare step by step. Differences over a threshold and different data become `failures`.

    Raises: UserError if the two logs do not have the same steps, because half a comparison must not pass.
    """
    _check_same_steps(reference, run)
    rows = [_row(step, reference.steps[step], run.steps[step]) for step in reference.steps]
    mean, biased = mean_and_bias([row.rel_loss for row in rows], thresholds.loss)
    equal, differs_at = _compare_batches(reference, run)
    comparison = Comparison(run.name, reference.name, rows, thresholds, equal, mean, biased, _max_update(reference))
    if differs_at is not None:
        comparison.failures.append(f"batch_hash differs first at step {differs_at}: the runs saw different data")
    loss, grad_norm = comparison.worst_loss, comparison.worst_grad_norm
    judge(comparison, f"the loss at step {loss.step}", loss.rel_loss, thresholds.loss)
    if grad_norm:
        judge(comparison, f"the grad norm at step {grad_norm.step}", grad_norm.rel_grad_norm, thresholds.grad_norm)
    return comparison


def _max_update(run: Run) -> float | None:
    """Twice the sum of the learning rates: Adam's update is about one learning rate, in either direction."""
    rates = [step.lr for step in run.steps.values()]
    return None if None in rates else 2 * sum(rates)


def judge(comparison: Comparison, what: str, rel: float, threshold: float | None) -> None:
    """Note a failure if the relative difference is over the threshold."""
    if threshold is not None and abs(rel) > threshold:
        comparison.failures.append(f"{what} differs by {abs(rel):.3g}, over the threshold {threshold:g}")


def signed_rel(value: float, reference: float) -> float:
    """(value - reference) / |reference|; infinite if only the reference is zero."""
    if value == reference:
        return 0.0
    return (value - reference) / abs(reference) if reference else math.copysign(math.inf, value)


def mean_and_bias(signed_rels: list[float], threshold: float) -> tuple[float, bool | None]:
    """The mean, and whether it is a bias: over 3 standard errors and a tenth of the threshold (None: not known)."""
    if not all(math.isfinite(rel) for rel in signed_rels):
        return math.inf, None
    mean = statistics.fmean(signed_rels)
    if len(signed_rels) < MIN_STEPS_FOR_BIAS:
        return mean, None
    standard_error = statistics.stdev(signed_rels) / math.sqrt(len(signed_rels))
    return mean, abs(mean) > 3 * standard_error and abs(mean) > threshold / 10


def _row(step: int, reference: Step, other: Step) -> Row:
    rel_loss = signed_rel(other.loss, reference.loss)
    both = None not in (other.grad_norm, reference.grad_norm)
    rel_grad_norm = signed_rel(other.grad_norm, reference.grad_norm) if both else None
    return Row(step, reference.loss, other.loss, rel_loss, reference.grad_norm, other.grad_norm, rel_grad_norm)


def _check_same_steps(reference: Run, run: Run) -> None:
    here, there = set(reference.steps), set(run.steps)
    if here == there:
        return
    where = f"{reference.name} and {run.name}"
    if not here & there:
        raise UserError(where, f"no step in common ({_span(here)} and {_span(there)})")
    step = min(here ^ there)
    lacking = run.name if step in here else reference.name
    raise UserError(
        where,
        f"logs of {len(here)} and {counted(len(there), 'step')}; step {step} is not in {lacking}",
        "the same steps",
    )


def _span(steps: set[int]) -> str:
    return f"steps {min(steps)} to {max(steps)}"


def _compare_batches(reference: Run, run: Run) -> tuple[bool | None, int | None]:
    """Whether all hashes agree (None: no step has both hashes), and the first step where they do not."""
    pairs = [(step, reference.steps[step].batch_hash, run.steps[step].batch_hash) for step in reference.steps]
    known = [(step, a, b) for step, a, b in pairs if a is not None and b is not None]
    differs_at = next((step for step, a, b in known if a != b), None)
    return (differs_at is None) if known else None, differs_at

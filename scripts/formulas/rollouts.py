"""What every peer is compared on: random rollouts, our losses of them, and the measure.

A row of a peer is a function of (its modules, a rollout). It returns our result and the peer's. Where a convention differs, the
row makes it equal and says so.
"""

import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import torch

from trainer.methods import advantages as adv
from trainer.models.losses import policy_loss as losses
from trainer.models.losses.distances import Distance, distances

INPUTS, GROUP, WIDTH, LIMIT = 200, 4, 9, 1e-6
LOW, HIGH, DUAL = 0.2, 0.28, 3.0
THRESHOLD = 0.1  # of the off-policy sequence mask
EXTREMES = (0.0, 1e-12, 3.0, 15.0, 30.0)  # added to log-ratios
MAX_LOG_RATIO = 19.0  # of `held`


# --- modules of a peer


def plain(checkout: str, *packages: str) -> None:
    """Packages without their __init__.py, whose modules are those of the checkout."""
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(checkout, *name.split(".")))]


def absent(*names: str) -> None:
    """Empty modules in place of frameworks, and of modules that hold none of the maths."""
    for name in names:
        sys.modules[name] = MagicMock()


# --- rollouts


@dataclass
class Rollout:
    """Random responses to prompts, GROUP each. Tensors are (n, WIDTH), but scores (n,)."""

    mask: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    scores: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, number: int) -> "Rollout":
        generator = torch.Generator().manual_seed(number)
        count = GROUP * (1 + number % 3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, WIDTH + 1, (count,), generator=generator)
        lengths[0] = WIDTH
        old = -normal(count, WIDTH).abs() - 0.01
        new = old + normal(count, WIDTH) * (0.05, 0.5, 2.0)[number % 3]
        new[1, 0] += EXTREMES[number % len(EXTREMES)] * (-1) ** number
        scores = normal(count) if number % 2 else (normal(count) > 0).double()
        if number % 7 == 0:
            scores[:GROUP] = 1.0  # a group of equal scores
        mask = torch.arange(WIDTH)[None] < lengths[:, None]
        return cls(mask, old, new.requires_grad_(), normal(count, WIDTH) * mask, scores, normal(count, WIDTH) * mask)

    @property
    def index(self):
        return (torch.arange(len(self.scores)) // GROUP).numpy()

    @property
    def rewards(self) -> torch.Tensor:
        return adv.token_rewards(self.scores, self.mask)


def as_it_is(rollout: Rollout) -> Rollout:
    return rollout


def held(rollout: Rollout) -> Rollout:
    """Only some hold ratios, and only we at e^20. So no log-ratio is further from 0 than MAX_LOG_RATIO."""
    log_ratio = (rollout.new - rollout.old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rollout.new = (rollout.old + log_ratio).requires_grad_()
    return rollout


def held_at_10(rollout: Rollout) -> Rollout:
    """verl and SkyRL hold the ratio of a response at e^10: no input is above."""
    rollout.new = torch.minimum(rollout.new.detach(), rollout.old + 10).requires_grad_()
    return rollout


def probable(rollout: Rollout) -> Rollout:
    """No probability is above 1, as DPPO's divergences need."""
    rollout.new = rollout.new.detach().clamp(max=-1e-6).requires_grad_()
    return rollout


def one_advantage(rollout: Rollout) -> Rollout:
    """Each response has one advantage, as GSPO's gradient of a response needs to be that of its tokens."""
    held_at_10(rollout).advantages = rollout.advantages[:, :1].expand(rollout.mask.shape)
    return rollout


def right_or_wrong(rollout: Rollout) -> Rollout:
    """Scores of 0 and above, as MaxRL needs."""
    rollout.scores = rollout.scores.abs()
    return rollout


# --- our results


def mean_by_sequence(rollout: Rollout) -> Callable[[torch.Tensor], torch.Tensor]:
    mask = rollout.mask
    return lambda values: ((values * mask).sum(1) / mask.sum(1))[:, None].expand_as(values)


def our_loss(rollout: Rollout, name: str, loss_agg: str, **options) -> torch.Tensor:
    """The mean loss that a step descends."""
    mask, lengths = rollout.mask, rollout.mask.sum(1).tolist()
    chosen, log_ratio = options.pop("chosen", None), rollout.new - rollout.old
    parts = rollout.new, log_ratio, rollout.advantages, mean_by_sequence(rollout), chosen
    own = losses.PolicyOptions(eps_low=LOW, eps_high=HIGH, **options)
    values, _, _ = losses.POLICY_LOSSES[name](losses.PolicyTokens(*parts), own)
    weights = torch.tensor(losses.token_weights(lengths, loss_agg, WIDTH, GROUP), dtype=torch.float64)
    count = sum(losses.num_targets(length, loss_agg) for length in lengths)
    return (torch.where(mask, values, 0.0) * weights[:, None]).sum() / count


def loss_case(theirs: Callable, name: str, loss_agg: str, inputs: Callable = as_it_is, **options) -> Callable:
    """`theirs(peer, rollout)` is the loss of the peer. `inputs` changes a rollout."""

    def case(peer, rollout: Rollout) -> tuple:
        rollout = inputs(rollout)
        return our_loss(rollout, name, loss_agg, **options), theirs(peer, rollout)

    return case


def gradients_of(case: Callable) -> Callable:
    """The peer's loss has another value, and is meant to have our gradient."""

    def without_values(peer, rollout: Rollout) -> tuple:
        return tuple(loss - loss.detach() for loss in case(peer, rollout))

    return without_values


def our_advantages(rollout: Rollout, estimator: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    own = adv.AdvantageOptions(estimator, GROUP, **options)
    return adv.estimate_advantages(own, rollout.scores, rollout.mask, values=rollout.values)


def estimator_case(theirs: Callable, name: str, inputs: Callable = as_it_is) -> Callable:
    """`theirs(peer, rollout)` are the advantages of the peer, before its mask."""

    def case(peer, rollout: Rollout) -> tuple:
        rollout = inputs(rollout)
        return our_advantages(rollout, name)[0], theirs(peer, rollout) * rollout.mask

    return case


def whitened(rollout: Rollout, ours: torch.Tensor) -> torch.Tensor:
    """Peers divide by the unbiased variance: (count - 1) / count of it is ours."""
    count = rollout.mask.sum()
    return ours * ((count - 1) / count).sqrt()


def near_enough(rollout: Rollout) -> torch.Tensor:
    tokens = losses.PolicyTokens(rollout.new, None, rollout.advantages, mean_by_sequence(rollout))
    return (losses.near_enough(tokens, rollout.old, THRESHOLD) * rollout.mask).double()


def distance_case(theirs: Callable, distance: Distance, most: float = math.inf) -> Callable:
    """The sum of distances from a teacher, where `new` and `old` are logits. `theirs(peer, model, teacher)` is the peer's."""

    def case(peer, rollout: Rollout) -> tuple:
        rollout.new = rollout.new.detach().clamp(-most, most).requires_grad_()
        return distances(rollout.new, rollout.old, distance).sum(), theirs(peer, rollout.new, rollout.old)

    return case


# --- the measure


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value of theirs, or of 1."""
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return math.inf
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()


def largest(peer, case: Callable) -> float:
    """The largest difference of values and of gradients over all inputs."""
    worst = 0.0
    for number in range(INPUTS):
        results = case(peer, rollout := Rollout.random(number))
        worst = max(worst, difference(*(result.detach() for result in results)))
        if all(result.requires_grad for result in results):
            found = [torch.autograd.grad(result.sum(), rollout.new, retain_graph=True)[0] for result in results]
            worst = max(worst, difference(*found))
    return worst


def measure(load: Callable, rows: dict[str, Callable], checkout: str) -> dict[str, float]:
    """{formula: the largest difference from the peer at `checkout`}."""
    peer = load(checkout)
    return {formula: largest(peer, case) for formula, case in rows.items()}

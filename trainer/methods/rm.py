"""Reward modelling: the mean preference loss over the pairs of the global batch. The last token has a side's score."""

from collections.abc import Callable

import torch

from trainer.metrics import MetricSum
from trainer.models.losses.preference_loss import REWARD_LOSSES
from trainer.models.losses.sequence_sums import counts_here, sum_by_sequence
from trainer.models.reward import token_scores
from trainer.training.per_sample import values_by_row


def pair_scores(model, micro_batch: dict, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (chosen, rejected), each (pairs,), fp64, from one forward pass; all-reduced over sp."""
    n = len(micro_batch["margins"])  # 0 on a rank that gets nothing of a short batch
    last_scores = token_scores(model, micro_batch) * micro_batch["is_last"]
    scores = sum_by_sequence(last_scores, micro_batch["sequence_ids"], 2 * n, sp_group)
    return scores[:n], scores[n:]


def make_reward_loss(loss: str, sp_group, center_coef: float = 0.0) -> Callable:
    """The loss function for a name in REWARD_LOSSES. Its metrics are sums over pairs.

    `center_coef` times (chosen + rejected)^2 is added, so that scores have a mean near 0 (Eisenstein et al. 2023).
    """

    def reward_loss(model, micro_batch: dict):
        chosen, rejected = pair_scores(model, micro_batch, sp_group)
        losses = REWARD_LOSSES[loss](chosen, rejected, micro_batch["margins"])
        if center_coef:
            losses = losses + center_coef * (chosen + rejected) ** 2
        weight = counts_here(sp_group)

        def total(values: torch.Tensor) -> torch.Tensor:
            return weight * values.detach().sum()

        metrics = {
            "accuracy": MetricSum(total((chosen > rejected).double())),
            "margin": MetricSum(total(chosen - rejected)),
            "chosen_reward": MetricSum(total(chosen), squares=total(chosen**2)),
            "rejected_reward": MetricSum(total(rejected), squares=total(rejected**2)),
        }
        return weight * losses.sum(), losses.new_full((), weight * losses.numel()), metrics

    return reward_loss


def evaluation_scores(strategy, model, loader, pairs, sp_group) -> torch.Tensor:
    """Scores (pairs, 2) of chosen and rejected sides, on the host, on every rank (one all-reduce over dp x sp)."""
    rows = torch.as_tensor(pairs["row"])
    model.eval()
    scores = values_by_row(
        strategy,
        loader,
        lambda micro_batch: counts_here(sp_group) * torch.stack(pair_scores(model, micro_batch, sp_group), dim=1),
        int(rows.max()) + 1,
    )
    model.train()
    return scores.cpu()[rows]

"""Reward modelling: the mean preference loss over the pairs of the global batch, from scores at each side's last token."""

from collections.abc import Callable

import torch

from trainer.metrics import MetricSum
from trainer.models.preference_loss import REWARD_LOSSES
from trainer.models.reward import token_scores
from trainer.models.sequence_sums import counts_here, sum_by_sequence
from trainer.training.per_sample import values_by_row


def pair_scores(model, micro_batch: dict, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, rejected) scores (pairs,), fp64, of one forward pass; all-reduced over sp."""
    n = len(micro_batch["margins"])  # 0 on a rank to which a short batch gives nothing
    last_scores = token_scores(model, micro_batch) * micro_batch["is_last"]
    scores = sum_by_sequence(last_scores, micro_batch["sequence_ids"], 2 * n, sp_group)
    return scores[:n], scores[n:]


def make_reward_loss(loss: str, sp_group) -> Callable:
    """The loss function of a name in REWARD_LOSSES; its metrics are sums over pairs."""

    def reward_loss(model, micro_batch: dict):
        chosen, rejected = pair_scores(model, micro_batch, sp_group)
        losses = REWARD_LOSSES[loss](chosen, rejected, micro_batch["margins"])
        weight = counts_here(sp_group)

        def total(values: torch.Tensor) -> torch.Tensor:
            return weight * values.detach().sum()

        metrics = {
            "accuracy": MetricSum(total((chosen > rejected).double())),
            "margin": MetricSum(total(chosen - rejected)),
            "chosen_reward": MetricSum(total(chosen), squares=total(chosen**2)),
            "rejected_reward": MetricSum(total(rejected), squares=total(rejected**2)),
        }
        return weight * losses.sum(), losses.new_tensor(weight * losses.numel()), metrics

    return reward_loss


def evaluation_scores(strategy, model, loader, pairs, sp_group) -> torch.Tensor:
    """(pairs, 2) scores of the chosen and the rejected side, on the host, on every rank (one all-reduce over dp x sp)."""
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

"""KTO: a mean loss over the single answers of the global batch, desirable and undesirable (Ethayarajh et al. 2024).

The reference point z_0 is an estimate of KL(policy || reference). It is one number for the whole global batch, so the
loss does not depend on how the batch is cut. A first pass over the batch computes it, without gradients.
"""

import torch

from trainer.methods.dpo import sequence_log_probs
from trainer.metrics import MetricSum
from trainer.models.lora import fixed_model
from trainer.models.losses.preference_loss import kto_loss
from trainer.models.losses.sequence_sums import counts_here
from trainer.training.loop import TwoPassLoss


def make_kto_loss(beta: float, desirable_weight: float, undesirable_weight: float, reference, sp_group) -> TwoPassLoss:
    """Loss and metrics of a micro-batch of `collate_unpaired`. For `reference`, see `fixed_model`."""

    def log_ratios(model, micro_batch: dict, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(log pi(y) - log ref(y), log pi(y)) of every sequence, each (n,)."""
        policy, _ = sequence_log_probs(model, micro_batch, num_sequences, sp_group)
        with fixed_model(model, reference) as base:
            fixed, _ = sequence_log_probs(base, micro_batch, num_sequences, sp_group)
        return policy - fixed, policy

    def mismatched_ratios(model, micro_batch: dict) -> torch.Tensor:
        """Sum and number of the log-ratios of answers to other prompts. Their mean estimates the KL."""
        batch = micro_batch["mismatched"]
        ratios, _ = log_ratios(model, batch, batch["num_sequences"])
        weight = counts_here(sp_group)
        return torch.stack([weight * ratios.sum(), ratios.new_full((), weight * ratios.numel())])

    def loss(model, micro_batch: dict, sums: torch.Tensor, num_targets: int):
        kl = (sums[0] / sums[1]).clamp(min=0.0)  # the sums of the load-balancing loss may follow
        desirable = micro_batch["desirable"].double()
        ratios, policy = log_ratios(model, micro_batch, len(desirable))
        values = kto_loss(ratios, desirable, kl, beta, desirable_weight, undesirable_weight)
        weight = counts_here(sp_group)
        rewards, undesirable = beta * ratios, 1 - desirable
        right = torch.where(desirable > 0, ratios > kl, ratios < kl).double()

        def total(values: torch.Tensor) -> torch.Tensor:
            return weight * values.detach().sum()

        def mean_where(chosen: torch.Tensor, values: torch.Tensor) -> MetricSum:
            return MetricSum(total(values * chosen), count=total(chosen))

        metrics = {
            "kl": MetricSum(total(kl.expand_as(ratios))),
            "reward_accuracy": MetricSum(total(right)),
            "chosen_rewards": mean_where(desirable, rewards),
            "rejected_rewards": mean_where(undesirable, rewards),
            "chosen_logps": mean_where(desirable, policy),
            "rejected_logps": mean_where(undesirable, policy),
        }
        return weight * values.sum(), values.new_full((), weight * values.numel()), metrics

    return TwoPassLoss(mismatched_ratios, loss)

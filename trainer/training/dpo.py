"""Preference optimization: the mean loss over the pairs of the global batch, from log-probs of whole answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch

from trainer.datasets.packing import IGNORE
from trainer.models import preference_loss as losses
from trainer.models.log_probs import counts_here, label_log_probs, sum_by_sequence
from trainer.models.lora import fixed_model
from trainer.models.preference_loss import AnswerLogProbs

REFERENCE_FREE = ("simpo", "orpo")


@dataclass(frozen=True)
class PreferenceOptions:
    """Which loss, and its constants."""

    loss: str
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    nll_loss_coef: float = 0.0

    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE


def sequence_log_probs(model, micro_batch: dict, num_sequences: int, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the answers of a micro-batch and the numbers of their tokens, both (n,), fp64; all-reduced over sp."""
    labels, sequence_ids = micro_batch["labels"], micro_batch["sequence_ids"]
    log_probs = label_log_probs(model, micro_batch)
    sums = sum_by_sequence(log_probs, sequence_ids, num_sequences, sp_group)
    return sums, sum_by_sequence(labels != IGNORE, sequence_ids, num_sequences, sp_group)


def answer_log_probs(model, micro_batch: dict, sp_group) -> AnswerLogProbs:
    """Log-probs of both answers of every pair, by one forward pass; all-reduced over sp."""
    n = len(micro_batch["margins"])  # 0 on a rank to which a short batch gives nothing
    sums, lengths = sequence_log_probs(model, micro_batch, 2 * n, sp_group)
    return AnswerLogProbs(sums[:n], sums[n:], lengths[:n], lengths[n:])


def reference_log_probs(policy, reference, micro_batch: dict, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, rejected) of the reference, each (n,), by a forward pass."""
    with fixed_model(policy, reference) as model:
        found = answer_log_probs(model, micro_batch, sp_group)
    return found.chosen, found.rejected


def pair_losses(policy: AnswerLogProbs, margin: Optional[torch.Tensor], options: PreferenceOptions) -> torch.Tensor:
    """The loss of each pair; `margin` is log pi/ref of the chosen answer less that of the rejected one."""
    beta = options.beta
    if options.loss == "simpo":
        result = losses.simpo_loss(policy, beta, options.simpo_gamma)
    elif options.loss == "orpo":
        result = losses.orpo_loss(policy, beta)
    elif options.loss == "cdpo":
        result = losses.cdpo_loss(margin, beta, options.label_smoothing)
    else:
        result = {"dpo": losses.dpo_loss, "ipo": losses.ipo_loss, "hinge": losses.hinge_loss}[options.loss](
            margin, beta
        )
    if options.nll_loss_coef:  # Pang et al. 2024, Iterative reasoning preference optimization, equation 1
        result = result - options.nll_loss_coef * policy.mean_chosen()
    return result


def make_preference_loss(options: PreferenceOptions, reference, sp_group, precomputed: bool = False) -> Callable:
    """The loss function of one choice of options; its metrics are sums over pairs.

    `reference` is a prepared frozen model; None if the loss needs none, the pairs carry its log-probs (`precomputed`), or
    it is the base of a model with an adapter.
    """

    def preference_loss(model, micro_batch: dict):
        policy = answer_log_probs(model, micro_batch, sp_group)
        if options.needs_reference():
            if precomputed:
                ref_chosen, ref_rejected = micro_batch["ref_chosen"], micro_batch["ref_rejected"]
            else:
                ref_chosen, ref_rejected = reference_log_probs(model, reference, micro_batch, sp_group)
            chosen_ratio, rejected_ratio = policy.chosen - ref_chosen, policy.rejected - ref_rejected
            chosen_rewards, rejected_rewards = options.beta * chosen_ratio, options.beta * rejected_ratio
            margin = chosen_ratio - rejected_ratio
        else:  # what these losses compare: mean log-probs of tokens
            chosen_rewards = options.beta * policy.mean_chosen()
            rejected_rewards = options.beta * policy.mean_rejected()
            margin = None
        values = pair_losses(policy, margin, options)
        weight = counts_here(sp_group)
        metrics = {
            "chosen_rewards": chosen_rewards,
            "rejected_rewards": rejected_rewards,
            "reward_margin": chosen_rewards - rejected_rewards,
            "reward_accuracy": (chosen_rewards > rejected_rewards).double(),
            "chosen_logps": policy.chosen,
            "rejected_logps": policy.rejected,
        }
        if options.needs_reference():  # log pi/ref, mean of both answers: the KL, were they the policy's samples
            metrics["kl"] = (chosen_ratio + rejected_ratio) / 2
        sums = {name: weight * metric.detach().sum() for name, metric in metrics.items()}
        return weight * values.sum(), values.new_tensor(weight * values.numel()), sums

    return preference_loss

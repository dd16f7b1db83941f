"""Preference optimization. The loss is a mean over the pairs of the global batch, from log-probs of whole answers."""

from collections.abc import Callable

import torch

from trainer.comma_separated import names_in
from trainer.datasets.batches.packing import IGNORE
from trainer.metrics import MetricSum
from trainer.models.lora import fixed_model
from trainer.models.losses.preference_loss import PAIR_LOSSES, AnswerLogProbs, LogRatios, PreferenceOptions, pair_losses
from trainer.models.losses.sequence_sums import counts_here, sum_by_sequence
from trainer.models.losses.token_losses import label_log_probs


def sequence_log_probs(model, micro_batch: dict, num_sequences: int, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the answers of a micro-batch and their token counts, both (n,), fp64; all-reduced over sp."""
    labels, sequence_ids = micro_batch["labels"], micro_batch["sequence_ids"]
    log_probs = label_log_probs(model, micro_batch)
    sums = sum_by_sequence(log_probs, sequence_ids, num_sequences, sp_group)
    return sums, sum_by_sequence(labels != IGNORE, sequence_ids, num_sequences, sp_group)


def answer_log_probs(model, micro_batch: dict, sp_group) -> AnswerLogProbs:
    """Log-probs of both answers of every pair, from one forward pass; all-reduced over sp."""
    n = len(micro_batch["margins"])  # 0 on a rank that gets nothing of a short batch
    sums, lengths = sequence_log_probs(model, micro_batch, 2 * n, sp_group)
    return AnswerLogProbs(sums[:n], sums[n:], lengths[:n], lengths[n:])


def reference_log_probs(policy, reference, micro_batch: dict, sp_group) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (chosen, rejected) of the reference, each (n,), from one forward pass."""
    with fixed_model(policy, reference) as model:
        found = answer_log_probs(model, micro_batch, sp_group)
    return found.chosen, found.rejected


def make_preference_loss(
    options: PreferenceOptions, reference, sp_group, precomputed: bool = False, sampled: bool = False
) -> Callable:
    """The loss function for these options. Its metrics are sums over pairs.

    `reference` is a prepared frozen model. It is None if the loss needs no reference, if the pairs have its log-probs
    (`precomputed`), or if the reference is the base of a model with an adapter. If the policy `sampled` the answers,
    the metric `rollout_logprob_diff` is |training - engine| of an answer's log-prob, per token.
    """

    needs_reference = any(PAIR_LOSSES[name].needs_reference for name in names_in(options.loss))

    def preference_loss(model, micro_batch: dict):
        policy = answer_log_probs(model, micro_batch, sp_group)
        if needs_reference:
            if precomputed:
                ref_chosen, ref_rejected = micro_batch["ref_chosen"], micro_batch["ref_rejected"]
            else:
                ref_chosen, ref_rejected = reference_log_probs(model, reference, micro_batch, sp_group)
            chosen_ratio, rejected_ratio = policy.chosen - ref_chosen, policy.rejected - ref_rejected
            chosen_rewards, rejected_rewards = options.beta * chosen_ratio, options.beta * rejected_ratio
            ratios = LogRatios(chosen_ratio, rejected_ratio)
        else:  # these losses compare mean log-probs of tokens
            chosen_rewards = options.beta * policy.mean_chosen()
            rejected_rewards = options.beta * policy.mean_rejected()
            ratios = None
        values = pair_losses(policy, ratios, options)
        weight = counts_here(sp_group) * micro_batch["has_loss"]
        metrics = {
            "chosen_rewards": chosen_rewards,
            "rejected_rewards": rejected_rewards,
            "reward_margin": chosen_rewards - rejected_rewards,
            "reward_accuracy": (chosen_rewards > rejected_rewards).double(),
            "chosen_logps": policy.chosen,
            "rejected_logps": policy.rejected,
        }
        if needs_reference:  # log pi/ref, mean of both answers; this would be the KL if the policy had sampled them
            metrics["kl"] = (chosen_ratio + rejected_ratio) / 2
        sums = {name: (weight * metric.detach()).sum() for name, metric in metrics.items()}
        if sampled:  # ties count too
            chosen, rejected = (
                getattr(policy, side) - micro_batch[f"engine_{side}"] for side in ("chosen", "rejected")
            )
            lengths = (policy.chosen_lengths + policy.rejected_lengths).clamp(min=1)  # answers that failed have none
            each = (chosen.abs() + rejected.abs()) / lengths
            here = counts_here(sp_group) * torch.ones_like(each)
            sums["rollout_logprob_diff"] = MetricSum((here * each.detach()).sum(), here.sum())
        return (weight * values).sum(), weight.sum(), sums

    return preference_loss

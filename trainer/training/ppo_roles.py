"""The roles of RLHF, each a prepared model and one function: policy and reference, critic, reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from trainer.datasets.packing import IGNORE
from trainer.models import policy_loss as losses
from trainer.models.actor import causal_lm_logits
from trainer.models.log_probs import counts_here, sum_by_sequence, token_entropies, token_log_probs
from trainer.models.reward import token_scores
from trainer.training.advantages import kl_estimate


@dataclass(frozen=True)
class PolicyOptions:
    """Which loss of the policy, and its constants; `kl_estimator` is None without a KL term in the loss."""

    loss: str = "ppo"
    loss_agg: str = "token"
    temperature: float = 1.0
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: Optional[float] = None
    entropy_coef: float = 0.0
    kl_estimator: Optional[str] = None
    value_clip: Optional[float] = None


def policy_log_probs(model, micro_batch: dict, temperature: float) -> torch.Tensor:
    """(rows, tokens) fp32 log-probs of the response tokens under the distribution that they were sampled from."""
    return token_log_probs(causal_lm_logits(model, micro_batch), micro_batch["labels"], temperature=temperature)


def critic_values(model, micro_batch: dict) -> torch.Tensor:
    """(rows, tokens) fp32 values of the state before each response token."""
    return token_scores(model, micro_batch) * (micro_batch["labels"] != IGNORE)


def reward_scores(strategy, model, batches: list, num_samples: int, sp_group) -> torch.Tensor:
    """(num_samples,) fp64 scores at the last token of every sample (all-reduce over sp, then over dp x sp)."""
    scores = torch.zeros(num_samples, dtype=torch.float64, device=strategy.device)
    with torch.no_grad():
        for batch in batches:
            for micro_batch in batch.micro_batches:
                last = token_scores(model, micro_batch) * micro_batch["is_last"]
                numbers = micro_batch["sample_numbers"]
                sums = sum_by_sequence(last, micro_batch["sequence_ids"], len(numbers), sp_group)
                scores[numbers] += counts_here(sp_group) * sums
    return strategy.all_reduce(scores)


def denominator(micro_batch: dict, loss_agg: str, sp_group) -> torch.Tensor:
    """What this rank's part of a micro-batch adds to the count that the loss is a mean over."""
    if loss_agg == "token":
        return (micro_batch["labels"] != IGNORE).sum()
    return micro_batch["labels"].new_tensor(counts_here(sp_group) * len(micro_batch["response_lengths"]))


def make_policy_loss(options: PolicyOptions, kl_coef: Callable[[], float], sp_group) -> Callable:
    """The loss function of the policy, for `loop.forward_backward`. Micro-batches carry advantages, old_log_probs and,
    where they are asked for, ref_log_probs and tis_weights (rows, tokens). `kl_coef()` is the coefficient of the moment.

    Its metrics are sums over response tokens, to be divided by response_tokens; policy_loss is summed like the loss.
    """

    def policy_loss(model, micro_batch: dict):
        labels = micro_batch["labels"]
        keep = labels != IGNORE
        logits = causal_lm_logits(model, micro_batch)
        log_probs = token_log_probs(logits, labels, temperature=options.temperature).double()
        # on the only update of a rollout, nothing has noted them before
        log_ratio = log_probs - micro_batch.setdefault("old_log_probs", log_probs.detach())
        values, clipped, used_ratio = _policy_losses(options, log_probs, log_ratio, micro_batch, sp_group)
        if "tis_weights" in micro_batch:
            values = values * micro_batch["tis_weights"]
        weights = micro_batch["loss_weights"] * keep
        policy_sum = (values * weights).sum()
        total = policy_sum
        with torch.set_grad_enabled(bool(options.entropy_coef) and torch.is_grad_enabled()):
            entropies = token_entropies(logits, labels, temperature=options.temperature)
        if options.entropy_coef:
            total = total - options.entropy_coef * (entropies * weights).sum()
        metrics = {
            "entropy": entropies,
            "clip_fraction": clipped & keep,
            "ratio_deviation": (used_ratio.exp() - 1).abs() * keep,
            "approx_kl": -log_ratio * keep,
            "response_tokens": keep,
        }
        if options.kl_estimator:
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"], options.kl_estimator)
            total = total + kl_coef() * (kl * weights).sum()
            metrics["kl_loss"] = kl * keep
        sums = {name: values.detach().double().sum() for name, values in metrics.items()}
        return total, denominator(micro_batch, options.loss_agg, sp_group), {"policy_loss": policy_sum, **sums}

    return policy_loss


def _policy_losses(options: PolicyOptions, log_probs, log_ratio, micro_batch: dict, sp_group) -> tuple:
    """(loss, whether clipped, log-ratio that the loss is of) of each token."""
    advantages = micro_batch["advantages"]
    if options.loss == "reinforce":
        return losses.reinforce_loss(log_probs, advantages), torch.zeros_like(advantages, dtype=torch.bool), log_ratio
    if options.loss == "cispo":
        bounds = options.eps_low, options.eps_high
        return *losses.cispo_loss(log_probs, log_ratio, advantages, *bounds), log_ratio
    if options.loss == "gspo":  # the mean log-ratio of its sequence, at every token
        lengths, sequence_ids = micro_batch["response_lengths"], micro_batch["sequence_ids"]
        log_ratio = torch.where(micro_batch["labels"] != IGNORE, log_ratio, 0.0)
        means = sum_by_sequence(log_ratio, sequence_ids, len(lengths), sp_group) / lengths
        log_ratio = F.pad(means, (0, 1))[sequence_ids]  # padded: a micro-batch without a sample still has a token
    options_of_clip = options.eps_low, options.eps_high, options.dual_clip
    return *losses.ppo_loss(log_ratio, advantages, *options_of_clip), log_ratio


def make_value_loss(options: PolicyOptions, sp_group) -> Callable:
    """The loss function of the critic. Micro-batches carry old_values and returns (rows, tokens)."""

    def value_loss(model, micro_batch: dict):
        values = critic_values(model, micro_batch).double()
        per_token = losses.value_loss(values, micro_batch["old_values"], micro_batch["returns"], options.value_clip)
        keep = micro_batch["labels"] != IGNORE
        total = (per_token * micro_batch["loss_weights"] * keep).sum()
        sums = {"values": (values * keep).sum(), "response_tokens": keep.double().sum()}
        return total, denominator(micro_batch, options.loss_agg, sp_group), sums

    return value_loss

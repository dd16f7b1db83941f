"""The roles of RLHF: policy and reference, critic, reward model. Each is a prepared model and one function."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trainer.datasets.batches.packing import IGNORE
from trainer.methods.advantages import kl_estimate
from trainer.metrics import MetricSum
from trainer.models.lora import fixed_model
from trainer.models.losses import policy_loss as losses
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions, PolicyTokens
from trainer.models.losses.policy_values import policy_values
from trainer.models.losses.sequence_sums import counts_here, sum_by_sequence
from trainer.models.reward import token_scores


def policy_log_probs(
    model, micro_batch: dict, temperature: float, routers=None, replays=True, notes_entropies=False
) -> torch.Tensor:
    """Log-probs (rows, tokens), fp32, of the response tokens under the distribution that they were sampled from.

    `routers` of the model, with --routing_replay, choose the experts of the rollout if it `replays`. With
    `notes_entropies`, the micro-batch also gets the entropies of these distributions, as `old_entropies`.
    """
    if routers:
        routers.use(micro_batch if replays else {})
    log_probs, entropies = policy_values(model, micro_batch, temperature)
    if notes_entropies:
        micro_batch["old_entropies"] = entropies
    return log_probs


def reference_log_probs(references: Sequence, log_probs: Callable, policy, micro_batch: dict) -> torch.Tensor:
    """The `log_probs` of the reference (see `policy_log_probs`); of several, which are teachers, their mean."""
    found = []
    for reference in references:
        with fixed_model(policy, reference) as fixed:
            found.append(log_probs(fixed, micro_batch, replays=False).double())
    return mean_of_teachers(found, micro_batch)


def mean_of_teachers(values: list[torch.Tensor], micro_batch: dict) -> torch.Tensor:
    """The mean of the values (rows, tokens) of each teacher, by the shares of the teachers in each sample.

    `teacher_shares` (teachers, n) has a single 1 for a sample with a teacher of its own. Only several teachers need it.
    """
    if len(values) == 1:
        return values[0]
    shares = F.pad(micro_batch["teacher_shares"], (0, 1))[:, micro_batch["sequence_ids"]]  # padded: see below
    parts = [torch.where(share > 0, share.to(value.dtype) * value, 0.0) for share, value in zip(shares, values)]
    return sum(parts[1:], parts[0])


def critic_values(model, micro_batch: dict) -> torch.Tensor:
    """Values (rows, tokens), fp32, of the state before each response token."""
    return token_scores(model, micro_batch) * (micro_batch["labels"] != IGNORE)


def reward_scores(strategy, model, batches: list, num_samples: int, sp_group) -> torch.Tensor:
    """Scores (num_samples,), fp64, at the last token of every sample (all-reduce over sp, then over dp x sp)."""
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
    """The count that this rank's part of a micro-batch adds. The loss is a mean over the total count."""
    if loss_agg == "token":
        return ((micro_batch["labels"] != IGNORE) & (micro_batch["loss_weights"] > 0)).sum()
    return counts_here(sp_group) * micro_batch["has_loss"].sum()


def make_policy_loss(
    options: PolicyOptions,
    kl_coef: Callable[[], float],
    entropy_coef: Callable[[], float],
    sp_group,
    note_log_probs: Callable[[dict, torch.Tensor], None],
    routers=None,
) -> Callable:
    """The loss function of the policy, for `loop.forward_backward`.

    Micro-batches carry advantages and, if needed, old_log_probs, ref_log_probs, rollout_log_probs and tis_weights, each
    (rows, tokens). Only a rollout with a single update may lack old_log_probs. The current log-probs are then the old
    ones. The loss passes the current ones to `note_log_probs(micro_batch, log_probs)`. `kl_coef()` and
    `entropy_coef()` are the current coefficients. Metrics are means over response tokens, but policy_loss is a mean like the
    loss. `routers`: see `policy_log_probs`.
    """

    def policy_loss(model, micro_batch: dict):
        labels = micro_batch["labels"]
        keep = labels != IGNORE
        if routers:
            routers.use(micro_batch)
        of_entropy = entropy_coef()
        log_probs, entropies = policy_values(model, micro_batch, options.temperature, bool(of_entropy))
        log_probs = log_probs.double()
        note_log_probs(micro_batch, log_probs.detach())
        old_log_probs = micro_batch.get("old_log_probs", log_probs.detach())
        tokens = PolicyTokens(
            log_probs=log_probs,
            log_ratio=log_probs - old_log_probs,
            advantages=micro_batch["advantages"],
            mean_by_sequence=lambda values: _mean_by_sequence(values, micro_batch, sp_group),
            chosen=micro_batch["chosen"] > 0 if "chosen" in micro_batch else None,
        )
        values, clipped, used_ratio = POLICY_LOSSES[options.loss](tokens, options)
        if "tis_weights" in micro_batch:
            values = values * micro_batch["tis_weights"]
        of_tokens = {}
        if options.off_policy_mask_threshold is not None:
            near = losses.near_enough(tokens, micro_batch["rollout_log_probs"], options.off_policy_mask_threshold)
            values, of_tokens["off_policy_fraction"] = values * near, ~near & keep
        weights, rounded = micro_batch["loss_weights"] * keep, micro_batch.get("rounded", _unchanged)
        losses_of_policy = losses_of_tokens = values * weights
        if of_entropy:
            losses_of_tokens = losses_of_tokens - of_entropy * entropies * weights
        if "nll_weights" in micro_batch:
            losses_of_tokens = losses_of_tokens - log_probs * micro_batch["nll_weights"]
        clipped = clipped & keep
        of_tokens |= {
            "entropy": entropies,
            "clip_fraction": clipped,
            "clip_fraction_low": clipped & (used_ratio < 0),
            "clip_fraction_high": clipped & (used_ratio > 0),
            "ratio_deviation": (losses.bounded(used_ratio).exp() - 1).abs() * keep,
            "approx_kl": -tokens.log_ratio * keep,
        }
        if options.kl_estimator:
            kl = kl_estimate(log_probs, micro_batch["ref_log_probs"], options.kl_estimator)
            if options.kl_unbiased:
                kl = kl * losses.bounded(tokens.log_ratio).exp()
            losses_of_tokens = losses_of_tokens + kl_coef() * kl * weights
            of_tokens["kl_loss"] = kl * keep
        policy_sum = rounded(losses_of_policy).sum()
        metrics = {"policy_loss": MetricSum(policy_sum), **_means_over_tokens(of_tokens, keep, rounded)}
        return rounded(losses_of_tokens).sum(), denominator(micro_batch, options.loss_agg, sp_group), metrics

    return policy_loss


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values


def _means_over_tokens(
    values: dict[str, torch.Tensor], keep: torch.Tensor, rounded: Callable = _unchanged
) -> dict[str, MetricSum]:
    """Means over response tokens, as metrics, of values (rows, tokens) that are 0 outside response tokens.

    With --exact, `rounded` rounds them to a grid, so that their sums are exact.
    """
    sums = {name: rounded(value.detach().double()).sum() for name, value in values.items()}
    return {name: MetricSum(total, count=keep.sum()) for name, total in sums.items()}


def _mean_by_sequence(values: torch.Tensor, micro_batch: dict, sp_group) -> torch.Tensor:
    """At every token, the mean of `values` (rows, tokens) over its sequence's response tokens; all-reduced over sp."""
    lengths, sequence_ids = micro_batch["response_lengths"], micro_batch["sequence_ids"]
    values = torch.where(micro_batch["labels"] != IGNORE, values, 0.0)
    means = sum_by_sequence(values, sequence_ids, len(lengths), sp_group) / lengths
    return F.pad(means, (0, 1))[sequence_ids]  # padded: a micro-batch without a sample still has a token


def make_value_loss(options: PolicyOptions, sp_group) -> Callable:
    """The loss function of the critic. Micro-batches carry old_values and returns (rows, tokens)."""

    def value_loss(model, micro_batch: dict):
        values = critic_values(model, micro_batch).double()
        of_tokens = losses.value_loss(values, micro_batch["old_values"], micro_batch["returns"], options.value_clip)
        keep = micro_batch["labels"] != IGNORE
        total = (of_tokens * micro_batch["loss_weights"] * keep).sum()
        metrics = _means_over_tokens({"values": values * keep}, keep)
        return total, denominator(micro_batch, options.loss_agg, sp_group), metrics

    return value_loss

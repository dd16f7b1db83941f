"""The numbers of a rollout: log-probs, values and advantages of its tokens, and its metrics.

Scores and sizes are those of all samples, on every rank. Flat vectors are those of the tokens that this rank trains.
"""

import contextlib
import functools
from collections.abc import Callable

import torch

from trainer.models.lora import fixed_model
from trainer.models.policy_loss import bounded
from trainer.rollout.experience import Sample, collect, compute, spread
from trainer.rollout.placement import Part
from trainer.training import advantages as adv
from trainer.training.ppo_state import PPOOptions, RLState, Roles
from trainer.training.roles import critic_values, policy_log_probs


def scores_of(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([sample.score for sample in samples], dtype=torch.float64)


def _rollout_log_probs(part: Part) -> torch.Tensor:
    return torch.tensor([p for sample in part.samples for p in sample.log_probs], dtype=torch.float64)


def _sums(part: Part, **flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sum of each flat vector over the tokens of every sample of the rollout, (samples,) (all-reduce over dp x sp)."""
    mask = adv.rows_mask(part.lengths, part.width)
    shared = part.share(torch.stack([adv.to_rows(values, mask).sum(1) for values in flat.values()], 1))
    return dict(zip(flat, shared.T.contiguous()))


def _means(part: Part, **flat: torch.Tensor) -> dict[str, float]:
    """The mean of each flat vector over all tokens of the rollout (all-reduce over dp x sp)."""
    return {name: (sums.sum() / part.num_tokens).item() for name, sums in _sums(part, **flat).items()}


def sample_facts(samples: list[Sample]) -> dict[str, float]:
    """Metrics that need only the samples."""
    scores, sizes = scores_of(samples), [sample.size() for sample in samples]
    facts = {
        "reward": scores.mean().item(),
        "reward_std": scores.std(correction=0).item(),
        "response_length": sum(size.generated for size in sizes) / len(samples),
        "truncated_fraction": sum(not sample.finished for sample in samples) / len(samples),
    }
    if any(size.turns for size in sizes):
        facts["turns"] = sum(size.turns for size in sizes) / len(samples)
        facts["env_tokens"] = sum(size.response for size in sizes) / len(samples) - facts["response_length"]
    for name in dict.fromkeys(name for sample in samples for name in sample.metrics):
        values = [sample.metrics[name] for sample in samples if name in sample.metrics]  # some calls do not give it
        facts[f"reward_{name}"] = sum(values) / len(values)
    return facts


def shaped_scores(samples: list[Sample], state: RLState, options: PPOOptions) -> torch.Tensor:
    """Scores as the advantages use them: with the overlong penalty, normalised and clipped."""
    scores = scores_of(samples)
    if options.overlong_buffer_len:
        lengths = torch.tensor([sample.size().response for sample in samples], dtype=torch.float64)
        limit, factor = options.sampling.max_new_tokens, options.overlong_penalty_factor
        scores = scores + adv.overlong_penalty(lengths, limit, options.overlong_buffer_len, factor)
    if options.normalize_reward:
        state.moments.update(scores)
        scores = state.moments.normalize(scores)
    return scores if options.reward_clip_range is None else scores.clamp(*options.reward_clip_range)


def add_log_probs(strategy, roles: Roles, batches: list, options: PPOOptions, part: Part) -> dict[str, torch.Tensor]:
    """Add log-probs of policy and reference, and values of the critic, to the micro-batches (all-reduces over sp).

    Training uses the same micro-batches, so the ratio on the first update is exactly 1. Returns the flat vectors of `part` by
    name. If a rollout has only one update, and advantages need no log-probs of the policy, they are not computed here.
    The old log-probs are then from the update's own forward pass, and the loss notes them.
    """
    log_probs, actor = functools.partial(policy_log_probs, temperature=options.policy.temperature), roles.actor[0]
    models: dict[str, tuple] = {}
    if options.num_epochs * len(batches) > 1 or options.kl_in_rewards or options.tis_cap is not None:
        models["old_log_probs"] = (contextlib.nullcontext(actor), log_probs)
    if roles.has_reference:
        models["ref_log_probs"] = (fixed_model(actor, roles.reference), log_probs)
    if roles.critic is not None:
        models["old_values"] = (contextlib.nullcontext(roles.critic[0]), critic_values)
    flat = {}
    for name, (context, function) in models.items():
        with context as model:
            compute(batches, name, functools.partial(function, model))
        flat[name] = collect(strategy, batches, name, part)
    return flat


def log_prob_facts(part: Part, flat: dict, state: RLState, options: PPOOptions) -> dict[str, float]:
    """The KL to the reference, and the difference between log-probs of the rollout engine and of training.

    The difference is given as mean, as maximum, and as KL(rollout || training) by the k3 estimator.
    """
    old_log_probs, rollout_log_probs = flat["old_log_probs"], _rollout_log_probs(part)
    difference = (old_log_probs - rollout_log_probs).abs()
    values = {
        "rollout_logprob_diff": difference,
        "rollout_kl": adv.kl_estimate(rollout_log_probs, old_log_probs, "k3"),
    }
    if "ref_log_probs" in flat:
        values["kl"] = adv.kl_estimate(old_log_probs, flat["ref_log_probs"], options.kl_estimator)
    facts = _means(part, **values)
    if "kl" in facts:
        per_response = facts["kl"] * part.num_tokens / part.num_samples
        facts |= {"kl_coef": state.kl_coef, "kl_per_response": per_response}
    log_weights = old_log_probs - rollout_log_probs
    facts["rollout_ess"] = effective_share(log_weights, lambda values: _means(part, mean=values)["mean"])
    largest = adv.to_rows(difference, adv.rows_mask(part.lengths, part.width)).amax(1)
    return facts | {"rollout_logprob_diff_max": part.share(largest).max().item()}


def effective_share(log_weights: torch.Tensor, mean: Callable = lambda values: values.mean().item()) -> float:
    """The effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2), Kish 1965.

    Weights of exp(0) give 1. Weights [1, 0] give 0.5. `mean` is that over the tokens of all ranks.
    """
    weights = bounded(log_weights).exp()
    return mean(weights) ** 2 / mean(weights**2)


def add_advantages(batches: list, samples: list[Sample], part: Part, flat: dict, state: RLState, options) -> dict:
    """Add advantages, returns and importance weights to the micro-batches. Returns their metrics.

    Scores are compared over all samples, on every rank. Tokens are only those of `part` (all-reduces over dp x sp of a few
    numbers per sample).
    """
    mask, penalty, values = adv.rows_mask(part.lengths, part.width), None, None
    if options.kl_in_rewards:
        kl = adv.kl_estimate(flat["old_log_probs"], flat["ref_log_probs"], options.kl_estimator)
        penalty = state.kl_coef * adv.to_rows(kl, mask)
    if "old_values" in flat:
        values = adv.to_rows(flat["old_values"], mask)
    scores = shaped_scores(samples, state, options)
    if options.kl_in_score:
        scores, penalty = scores - part.share(penalty.sum(1)), None
    advantages, returns = adv.estimate_advantages(
        options.advantages, scores, mask, penalty, values, part.places, total=lambda sums: part.share(sums).sum()
    )
    spread(batches, "advantages", advantages[mask])
    spread(batches, "returns", returns[mask])
    told = {"advantage_abs": advantages[mask].abs()}
    if options.tis_cap is not None:
        log_ratio = adv.to_rows(flat["old_log_probs"] - _rollout_log_probs(part), mask)
        weights = adv.importance_weights(log_ratio, mask, options.tis_level, options.tis_cap, options.tis_mask)
        told["tis_weight"] = weights[mask]
        spread(batches, "tis_weights", told["tis_weight"])
    return _means(part, **told)

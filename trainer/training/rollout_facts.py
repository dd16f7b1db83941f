"""What a rollout's samples and log-probs say for the metrics. Values are the same on every rank."""

import torch

from trainer.models.policy_loss import bounded
from trainer.rollout.experience import Sample
from trainer.training import advantages as adv
from trainer.training.ppo_state import PPOOptions, RLState


def scores_of(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([sample.score for sample in samples], dtype=torch.float64)


def rollout_log_probs_of(samples: list[Sample]) -> torch.Tensor:
    return torch.tensor([p for sample in samples for p in sample.log_probs], dtype=torch.float64)


def sample_facts(samples: list[Sample]) -> dict[str, float]:
    """Metrics that need only the samples."""
    scores, lengths = scores_of(samples), [len(sample.generated()) for sample in samples]
    facts = {
        "reward": scores.mean().item(),
        "reward_std": scores.std(correction=0).item(),
        "response_length": sum(lengths) / len(samples),
        "truncated_fraction": sum(not sample.finished for sample in samples) / len(samples),
    }
    if any(sample.turns for sample in samples):
        facts["turns"] = sum(len(sample.turns) for sample in samples) / len(samples)
        facts["env_tokens"] = (
            sum(len(sample.response_ids) for sample in samples) / len(samples) - facts["response_length"]
        )
    for name in dict.fromkeys(name for sample in samples for name in sample.metrics):
        values = [sample.metrics[name] for sample in samples if name in sample.metrics]  # some calls do not give it
        facts[f"reward_{name}"] = sum(values) / len(values)
    return facts


def log_prob_facts(samples: list[Sample], flat: dict, state: RLState, options: PPOOptions) -> dict[str, float]:
    """The KL to the reference, and the difference between log-probs of the rollout engine and of training.

    The difference is given as mean, as maximum, and as KL(rollout || training) by the k3 estimator.
    """
    old_log_probs, rollout_log_probs = flat["old_log_probs"], rollout_log_probs_of(samples)
    difference, facts = old_log_probs - rollout_log_probs, {}
    if "ref_log_probs" in flat:
        kl = adv.kl_estimate(old_log_probs, flat["ref_log_probs"], options.kl_estimator)
        facts = {"kl": kl.mean().item(), "kl_coef": state.kl_coef, "kl_per_response": kl.sum().item() / len(samples)}
    return facts | {
        "rollout_logprob_diff": difference.abs().mean().item(),
        "rollout_logprob_diff_max": difference.abs().max().item(),
        "rollout_kl": adv.kl_estimate(rollout_log_probs, old_log_probs, "k3").mean().item(),
        "rollout_ess": effective_share(difference),
    }


def effective_share(log_weights: torch.Tensor) -> float:
    """The effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2), Kish 1965.

    Weights of exp(0) give 1. Weights [1, 0] give 0.5.
    """
    weights = bounded(log_weights).exp()
    return (weights.sum() ** 2 / (len(weights) * (weights**2).sum())).item()

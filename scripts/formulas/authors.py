"""The code of papers' own authors. Each is a fork of verl."""

from collections.abc import Callable
from functools import partial

import torch
from formulas import verl
from formulas.covariances import RANGE, SHARE, clip_cov_case, kl_cov_case
from formulas.entropies import ENTROPY, steps_of_entropies, used_coefs
from formulas.rollouts import HIGH, LOW, Rollout, estimator_case, gradients_of, loss_case, probable, right_or_wrong

load = verl.load_core

# --- DPPO: https://github.com/sail-sg/Stable-RL


def dppo(core, rollout: Rollout, name: str) -> torch.Tensor:
    """The loss with the old log-probs of training. The constant ratio has a bound, which no input reaches."""
    config = verl.Config(
        clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1e9, global_batch_info={}
    )
    args = rollout.values, rollout.new, rollout.advantages, rollout.mask.double()
    facts = {"rollout_log_prob": rollout.old, "entropy": rollout.values, "topk_kl": rollout.values}
    return core.get_policy_loss_fn(name)(*args, config=config, **facts)[0]


def dppo_case(kind: str) -> Callable:
    return gradients_of(loss_case(partial(dppo, name=f"dppo_binary_{kind}"), f"dppo_{kind}", "token", probable))


STABLE_RL: dict[str, Callable] = {"`dppo_tv`": dppo_case("tv"), "`dppo_kl`": dppo_case("kl")}


# --- the entropy mechanism: https://github.com/PRIME-RL/Entropy-Mechanism-of-RL


def clip_cov(core, rollout: Rollout) -> torch.Tensor:
    args = rollout.old, rollout.new, rollout.advantages, rollout.mask.double()
    bounds = {"clip_ratio": 1.0, "clip_cov_lb": RANGE[0], "clip_cov_ub": RANGE[1]}
    return core.compute_policy_loss_clip_cov(*args, cliprange_low=LOW, cliprange_high=HIGH, **bounds)[0]


def kl_cov(core, rollout: Rollout) -> torch.Tensor:
    args = rollout.old, rollout.new, rollout.advantages, rollout.mask.double()
    return core.compute_policy_loss_kl_cov(*args, k_percent=100 * SHARE, ppo_kl_coef=1.0)[0]


def their_share(rollout: Rollout) -> float:
    """The percentage that they choose is at most the number of tokens."""
    return min(SHARE, rollout.mask.sum().item() / 100)


ENTROPY_MECHANISM: dict[str, Callable] = {
    "`clip_cov`": clip_cov_case(clip_cov),
    "`kl_cov`": kl_cov_case(kl_cov, their_share),
}


# --- Skywork-OR1: https://github.com/SkyworkAI/Skywork-OR1


def adaptive_entropy(core, rollout: Rollout) -> tuple:
    """The coefficients of several steps. They start at 0, as in the paper. No entropy equals the target: it would be low here,
    as in TRL, and not in Skywork-OR1."""
    means = [of_step[rollout.mask].mean().item() for of_step in steps_of_entropies(rollout)]
    target, delta, most = ENTROPY
    controller, theirs = core.EntController(0.0, most, 0.0, delta, target, True), []
    for mean in means:
        theirs.append(controller.value * controller.entropy_loss_enabled)
        controller.update(mean)
    return torch.tensor(used_coefs(means)), torch.tensor(theirs)


SKYWORK_OR1: dict[str, Callable] = {"`--entropy_target`": adaptive_entropy}


# --- MaxRL: https://github.com/tajwarfahim/maxrl


def maxrl(core, rollout: Rollout) -> torch.Tensor:
    """They add 1e-6 to a mean, and the script 1e-12."""
    args = rollout.rewards, rollout.mask.double(), rollout.index
    return core.compute_maxrl_outcome_advantage(*args, epsilon=1e-12)[0]


MAXRL: dict[str, Callable] = {"`maxrl`": estimator_case(maxrl, "maxrl", right_or_wrong)}

"""From scores to advantages: pure functions of tensors, no process group inside.

Shapes: n samples (responses) of at most T tokens, rows padded on the right. `mask` (n, T) is 1 on response tokens; the
token at t is the action whose state is everything before it. Samples of one prompt stand together, n_samples_per_prompt
at a time. Computed in fp64 from the whole rollout, so that no layout can change an advantage.
"""

from dataclasses import dataclass
from typing import Optional

import torch

GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")  # these compare the samples of one prompt
WHITENED = ("gae", "reinforce", "reinforce_baseline")  # normalised over all tokens of the rollout
GROUP_EPSILON = 1e-6  # keeps a group of all but equal scores from blowing up


# --- rows of tokens


def to_rows(flat: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """(n, T) zero-padded rows of a vector of all response tokens; [1, 2, 3] of lengths [1, 2] is [[1, 0], [2, 3]]."""
    return torch.nn.utils.rnn.pad_sequence(flat.split(lengths), batch_first=True)


def rows_mask(lengths: list[int]) -> torch.Tensor:
    """(n, T) True on tokens; `rows[mask]` is the inverse of `to_rows`."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


# --- distance to the reference


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) per token from samples of the policy (Schulman 2020, Approximating KL divergence).

    With r = ref / policy: k1 = -log r; k2 = (log r)^2 / 2; k3 = r - 1 - log r.
    """
    log_ratio = ref_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return torch.expm1(log_ratio) - log_ratio


def adapt_kl_coef(coef: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The proportional controller of Ziegler et al. 2019, section 2.2: its error is clipped to 0.2."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


# --- scores


def overlong_penalty(lengths: torch.Tensor, max_len: int, buffer_len: int, factor: float) -> torch.Tensor:
    """0 up to max_len - buffer_len tokens, then linearly down to -factor at max_len (DAPO, Yu et al. 2025, equation 13)."""
    excess = (lengths - (max_len - buffer_len)).clamp(min=0)
    return -factor * (excess / buffer_len).clamp(max=1)


@dataclass
class RunningMoments:
    """Mean and variance of all scores so far, joined batch by batch (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    sum_square: float = 0.0  # of the deviations from the mean

    def update(self, values: torch.Tensor) -> None:
        values = values.double()
        count, mean = values.numel(), values.mean().item()
        delta, total = mean - self.mean, self.count + count
        self.sum_square += ((values - mean) ** 2).sum().item() + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        std = (self.sum_square / self.count) ** 0.5
        return (values - self.mean) / max(std, GROUP_EPSILON)


def compare_in_groups(
    scores: torch.Tensor, estimator: str, group_size: int, divide_by_std: bool = True
) -> torch.Tensor:
    """(n,) scores as compared with those of the other samples of the same prompt.

    reinforce_baseline (Hu et al. 2025, REINFORCE++) and dr_grpo (Liu et al. 2025, equation 3): less the group's mean.
    rloo (Kool et al. 2019; Ahmadian et al. 2024, equation 5): less the mean of the others. group_norm (Shao et al. 2024,
    GRPO, section 4.1.2): less the mean, divided by the standard deviation (n - 1). Any other estimator: unchanged.
    """
    if estimator not in GROUP_ESTIMATORS:
        return scores
    groups = scores.view(-1, group_size)
    centered = groups - groups.mean(1, keepdim=True)
    if estimator == "rloo":
        centered = centered * group_size / (group_size - 1)
    elif estimator == "group_norm" and divide_by_std:
        centered = centered / (groups.std(1, keepdim=True) + GROUP_EPSILON)
    return centered.flatten()


def groups_in_range(scores: torch.Tensor, group_size: int, low: float, high: float) -> torch.Tensor:
    """(prompts,) True where the mean score of a prompt's samples lies between, not on, the bounds (DAPO, section 3.2)."""
    means = scores.view(-1, group_size).mean(1)
    return (means > low) & (means < high)


# --- rewards and advantages of tokens


def token_rewards(scores: torch.Tensor, mask: torch.Tensor, penalty: Optional[torch.Tensor] = None) -> torch.Tensor:
    """(n, T) rewards: minus `penalty` at every token, the score at the last one (Ouyang et al. 2022, equation 2)."""
    last = mask.sum(1) - 1
    rewards = torch.zeros(mask.shape, dtype=scores.dtype)
    rewards[torch.arange(len(scores)), last] = scores
    return rewards if penalty is None else rewards - penalty * mask


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma G_{t+1} (Williams 1992), 0 where there is no token."""
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = (rewards[:, t] + gamma * following) * mask[:, t]
        returns[:, t] = following
    return returns


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (n, T) (Schulman et al. 2016, equations 11 to 16; the last token ends the episode).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; returns = A + V.
    """
    values = values * mask
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lambd * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """`values` less their mean over the tokens of `mask`, divided by the standard deviation of those."""
    count = mask.sum()
    centered = (values - (values * mask).sum() / count) * mask
    if not divide_by_std:
        return centered
    return centered / ((centered**2).sum() / count + 1e-8).sqrt()


@dataclass(frozen=True)
class AdvantageOptions:
    """Which estimator, and its constants."""

    estimator: str
    group_size: int = 1
    gamma: float = 1.0
    lambd: float = 1.0
    divide_by_std: bool = True


def estimate_advantages(
    options: AdvantageOptions,
    scores: torch.Tensor,
    mask: torch.Tensor,
    penalty: Optional[torch.Tensor] = None,
    values: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (n, T), of scores (n,), a penalty per token (KL, times its coefficient) and, for gae,
    the critic's values (n, T). Whitened over the whole rollout for gae, reinforce and reinforce_baseline."""
    shaped = compare_in_groups(scores, options.estimator, options.group_size, options.divide_by_std)
    rewards = token_rewards(shaped, mask, penalty)
    if options.estimator == "gae":
        advantages, returns = gae(rewards, values, mask, options.gamma, options.lambd)
    else:
        advantages = returns = discounted_returns(rewards, mask, options.gamma)
    if options.estimator in WHITENED:
        advantages = whiten(advantages, mask, options.divide_by_std)
    return advantages, returns

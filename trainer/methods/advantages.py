"""Turn scores into advantages, with pure functions of tensors and without a process group.

Shapes: there are n samples (responses) of at most T tokens, in rows padded on the right. `mask` (n, T) is 1 on response
tokens. The token at t is an action, and its state is everything before it. Samples of one prompt are adjacent, in
groups of n_samples_per_prompt. Everything is computed in fp64. Every rank compares the scores of the whole rollout. For
tokens, it has the rows that it trains. A sum over all rows adds the sums per row, so no layout can change an advantage.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from trainer.errors import UserError
from trainer.models.losses.policy_loss import bounded, differing

GROUP_ESTIMATORS = (
    "reinforce_baseline",
    "rloo",
    "group_norm",
    "dr_grpo",
    "maxrl",
    "scalerl",
)  # these compare the samples of one prompt
WHITENED = ("gae", "reinforce", "reinforce_baseline")  # these are normalised over all tokens of the rollout
GROUP_EPSILON = 1e-6  # limits the result if the scores of a group are almost equal


# --- rows of tokens


def to_rows(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Zero-padded rows (n, T, ...) of a vector (tokens, ...). [1, 2, 3] with lengths [1, 2] is [[1, 0], [2, 3]]."""
    rows = flat.new_zeros(*mask.shape, *flat.shape[1:])
    rows[mask] = flat
    return rows


def rows_mask(lengths: list[int], width: Optional[int] = None) -> torch.Tensor:
    """A mask (n, T) that is True on tokens. `rows[mask]` is the inverse of `to_rows`. T is the longest, or `width`."""
    return torch.arange(width or max(lengths))[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]


# --- distance to the reference


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) per token from samples of the policy (Schulman 2020, Approximating KL divergence).

    With r = ref / policy: k1 = -log r; k2 = (log r)^2 / 2; k3 = r - 1 - log r, where log r is clamped at +-20.
    """
    log_ratio = ref_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    log_ratio = bounded(log_ratio)
    return torch.expm1(log_ratio) - log_ratio


def within_kl(
    rollout_log_probs: torch.Tensor, log_probs: torch.Tensor, mask: torch.Tensor, estimator: str, most: float
) -> torch.Tensor:
    """(n,) True for responses whose mean KL(rollout || training) per token is at most `most`, by k1, k2 or k3.

    k1 counts by its absolute value: a large mean of either sign rejects (Liu et al. 2025, When speed kills stability).
    All log-probs are rows (n, T).
    """
    kl = kl_estimate(rollout_log_probs, log_probs, estimator) * mask
    return (kl.sum(1) / mask.sum(1)).abs() <= most


def adapt_kl_coef(coef: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The proportional controller of Ziegler et al. 2019, section 2.2. Its error is clipped to +-0.2."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


# --- scores


def overlong_penalty(lengths: torch.Tensor, max_len: int, buffer_len: int, factor: float) -> torch.Tensor:
    """Penalty of long responses (DAPO, Yu et al. 2025, equation 13).

    It is 0 up to max_len - buffer_len tokens. Then it falls linearly to -factor at max_len.
    """
    excess = (lengths - (max_len - buffer_len)).clamp(min=0)
    return -factor * (excess / buffer_len).clamp(max=1)


@dataclass
class RunningMoments:
    """Mean and variance of all scores so far, updated batch by batch (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    sum_square: float = 0.0  # sum of the squared deviations from the mean

    def update(self, values: torch.Tensor) -> None:
        values = values[~values.isnan()].double()
        count, mean = values.numel(), values.mean().item()
        delta, total = mean - self.mean, self.count + count
        self.sum_square += ((values - mean) ** 2).sum().item() + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        std = (self.sum_square / self.count) ** 0.5
        return (values - self.mean) / max(std, GROUP_EPSILON)


def compare_in_groups(
    scores: torch.Tensor, estimator: str, group_size: int, divide_by_std: bool = True, batch_std: bool = False
) -> torch.Tensor:
    """Compare each score (n,) with the scores of the other samples of the same prompt.

    reinforce_baseline (Hu et al. 2025, REINFORCE++) and dr_grpo (Liu et al. 2025, equation 3) subtract the group's
    mean. rloo (Kool et al. 2019; Ahmadian et al. 2024, equation 5) subtracts the mean of the others. group_norm (Shao
    et al. 2024, GRPO, section 4.1.2) subtracts the mean and divides by the standard deviation (n - 1). With `batch_std`,
    it divides by the standard deviation of all scores (Liu et al. 2025, Tricks or traps). maxrl (Tajwar et al. 2026,
    Maximum likelihood reinforcement learning, arXiv 2602.02710) divides by the mean; a group of zeros has the advantage 0.
    scalerl (Khatri et al. 2025, arXiv 2510.13786, section 4) subtracts the mean and divides by the standard deviation of
    all such differences, of the prompts whose scores differ. The others have no loss, see `SampleSet`.
    Other estimators leave the scores unchanged. A score of NaN is that of a failed sample: its group is as if it had
    fewer samples, and a sample that is left alone has the advantage 0.

    Raises:
        UserError: maxrl has a score below 0.
    """
    if estimator not in GROUP_ESTIMATORS:
        return scores
    groups, counted = scores.view(-1, group_size), ~scores.isnan()
    counts = counted.view(-1, group_size).sum(1, keepdim=True)
    means = groups.nansum(1, keepdim=True) / counts.clamp(min=1)
    centered = torch.where(groups.isnan(), 0.0, groups - means)
    if estimator == "rloo":
        centered = centered * counts / (counts - 1).clamp(min=1)
    elif estimator == "group_norm" and divide_by_std:
        variances = (centered**2).sum(1, keepdim=True) / (counts - 1).clamp(min=1)
        centered = centered / ((scores[counted].std() if batch_std else variances.sqrt()) + GROUP_EPSILON)
    elif estimator == "scalerl":
        counted &= differing(scores, group_size)
        centered = torch.where(counted.view_as(centered), centered, 0.0)
        deviation = centered.flatten()[counted].std() if counted.any() else 0.0
        centered = centered / (deviation + GROUP_EPSILON)
    elif estimator == "maxrl":
        if (lowest := scores[counted].min()) < 0:
            raise UserError("--advantage_estimator maxrl", f"a score of {lowest:g}", "scores of 0 or more")
        centered = centered / torch.where(means > 0, means, 1.0)
    return centered.flatten()


def normalized_apart(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """The advantage of each response, (n,), from the scores of several rewards (n, K), each normalised by itself.

    Each reward is compared in its groups as in group_norm. The sum with `weights` (K,) is then normalised over the rollout
    (GDPO: Liu et al. 2026, arXiv 2601.05242; TRL's normalize_then_sum). A reward of NaN adds 0. A response with no other
    stays NaN.
    """
    parts = torch.stack([compare_in_groups(own, "group_norm", group_size) for own in rewards.T], 1)
    lost = rewards.isnan().all(1)
    sums = torch.where(lost, math.nan, (parts * weights).sum(1))
    counted = sums[~lost]
    return (sums - counted.mean()) / (counted.std() + GROUP_EPSILON)


def groups_in_range(scores: torch.Tensor, group_size: int, low: float, high: float) -> torch.Tensor:
    """(prompts,) True if the scores of a prompt's samples differ, and their mean is between the bounds, not on one.

    DAPO, section 3.2: a group of equal scores has the advantage 0. Scores of NaN do not count.
    """
    groups = scores.view(-1, group_size)
    means = groups.nanmean(1)
    lowest, highest = range_of_groups(groups)
    return (means > low) & (means < high) & (highest > lowest)


def range_of_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest score of each group, (prompts,). Scores of NaN do not count; without others, inf and -inf."""
    return groups.nan_to_num(math.inf).amin(1), groups.nan_to_num(-math.inf).amax(1)


# --- rewards and advantages of tokens


def token_rewards(
    scores: torch.Tensor,
    mask: torch.Tensor,
    penalty: Optional[torch.Tensor] = None,
    of_turns: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Rewards (n, T): minus `penalty` at every token, plus the score at the last (Ouyang et al. 2022, equation 2).

    `of_turns` (n, T) take the place of the scores: the reward of each turn, at its last token.
    """
    if of_turns is None:
        rewards = torch.zeros(mask.shape, dtype=scores.dtype)
        rewards[torch.arange(len(scores)), mask.sum(1) - 1] = scores
    else:
        rewards = of_turns * mask
    return rewards if penalty is None else rewards - penalty * mask


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns G_t = r_t + gamma G_{t+1} (Williams 1992). They are 0 where there is no token."""
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = (rewards[:, t] + gamma * following) * mask[:, t]
        returns[:, t] = following
    return returns


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lambd: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (n, T), by Schulman et al. 2016, equations 11 to 16.

    The last token ends the episode. `lambd` is one number, or one for each row (n,).
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


def policy_lambdas(mask: torch.Tensor, fixed: Optional[float], alpha: Optional[float]) -> torch.Tensor:
    """The lambda of each response in the advantages of the policy, (n, ): `fixed`, or 1 - 1 / (alpha length), at least 0.

    VAPO (Yue et al. 2025, arXiv 2504.05118), equations 8 and 9. `mask` (n, T) has at least one token in each row.
    """
    lengths = mask.sum(1).double()
    return torch.full_like(lengths, fixed) if alpha is None else (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0)


def total_of_rows(values: torch.Tensor) -> torch.Tensor:
    """The sum of values per row, (n,), if these are all rows of the rollout."""
    return values.sum()


def whiten(
    values: torch.Tensor, mask: torch.Tensor, divide_by_std: bool = True, total: Callable = total_of_rows
) -> torch.Tensor:
    """Subtract the mean over the tokens of `mask`, and divide by the standard deviation over the same tokens.

    `total` sums values per row over all rows of the rollout. Other ranks may have some of them.
    """
    count = total(mask.sum(1).double())
    centered = (values - total((values * mask).sum(1)) / count) * mask
    if not divide_by_std:
        return centered
    return centered / (total((centered**2).sum(1)) / count + 1e-8).sqrt()


@dataclass(frozen=True)
class AdvantageOptions:
    """The estimator and its constants."""

    estimator: str
    group_size: int = 1
    gamma: float = 1.0
    lambd: float = 1.0
    divide_by_std: bool = True
    batch_std: bool = False
    policy_lambd: Optional[float] = None  # gae: of the policy's advantages; None: lambd
    policy_lambd_alpha: Optional[float] = None  # gae: in its place, by the length of the response
    has_teacher: bool = False  # the penalty is the distance to a teacher: it lowers advantages, not rewards


def estimate_advantages(
    options: AdvantageOptions,
    scores: torch.Tensor,
    mask: torch.Tensor,
    penalty: Optional[torch.Tensor] = None,
    values: Optional[torch.Tensor] = None,
    places: Sequence[int] | slice = slice(None),
    total: Callable = total_of_rows,
    of_turns: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (n, T), from the scores of the whole rollout. The n rows are at `places` in it.

    `penalty` (n, T) is the KL per token times its coefficient. `values` (n, T) come from the critic, and only gae needs
    them. For gae, reinforce and reinforce_baseline, advantages are whitened over the whole rollout by `total`. For gdpo,
    `scores` are those of `normalized_apart`. With a teacher, the advantage of a token is that of its scores minus its penalty,
    which is then log policy - log teacher (Lu and Thinking Machines Lab 2025, On-policy distillation). For distill, scores do
    not count. `of_turns`, only for gae and reinforce: see `token_rewards`. The tokens of a sample with a score of NaN count
    nowhere, and have the advantage 0.
    """
    mask = mask & ~scores.isnan()[places][:, None]
    of_teacher = -penalty * mask if options.has_teacher else 0.0
    if options.estimator == "distill":
        return of_teacher, of_teacher
    kind = options.estimator, options.group_size, options.divide_by_std, options.batch_std
    shaped = compare_in_groups(scores, *kind)[places].nan_to_num()
    rewards = token_rewards(shaped, mask, None if options.has_teacher else penalty, of_turns)
    if options.estimator == "gae":
        advantages, returns = gae(rewards, values, mask, options.gamma, options.lambd)
        own = options.policy_lambd, options.policy_lambd_alpha
        if own != (None, None):
            advantages, _ = gae(rewards, values, mask, options.gamma, policy_lambdas(mask, *own))
    else:
        advantages = returns = discounted_returns(rewards, mask, options.gamma)
    if options.estimator in WHITENED:
        advantages = whiten(advantages, mask, options.divide_by_std, total)
    return advantages + of_teacher, returns


# --- samples of another policy


def ratios(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Ratios pi_train / pi_rollout (n, T), from their logarithms: of a token, or one for all tokens of a response.

    `sequence` is the product of the response's ratios, `geometric` their geometric mean. Ratios [2, 1/8] of a response:
    sequence 1/4, geometric 1/2.
    """
    if level != "token":
        sums = (log_ratio * mask).sum(1, keepdim=True)
        log_ratio = (sums / mask.sum(1, keepdim=True) if level == "geometric" else sums).expand_as(log_ratio)
    return log_ratio.exp()


def importance_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, level: str, cap: float, floor: float = 0.0
) -> torch.Tensor:
    """Weights (n, T) of the tokens: the `ratios` of this level, at least `floor` and at most `cap`.

    token: Yao et al. 2025, Your efficient RL framework secretly brings you off-policy training. sequence: Liu et al. 2025,
    When speed kills stability. geometric: the ratio of GSPO (Zheng et al. 2025, equation 7).
    """
    return ratios(log_ratio, mask, level).clamp(floor, cap)


def within_ratios(log_ratio: torch.Tensor, mask: torch.Tensor, level: str, bounds: tuple[float, float]) -> torch.Tensor:
    """(n, T) True where the `ratios` of this level are in the closed interval `bounds`. Others are rejected.

    token: IcePop (Ling Team 2025, Every step evolves, arXiv 2510.18855). sequence: masked importance sampling (Liu et al.
    2025, When speed kills stability). geometric, with weights of tokens: seq-mask-tis of NeMo-RL and OpenRLHF.
    """
    found = ratios(log_ratio, mask, level)
    return (found >= bounds[0]) & (found <= bounds[1])


def weights_of_kept(kept: torch.Tensor, mask: torch.Tensor, loss_agg: str) -> torch.Tensor:
    """Factors (n, T) of `token_weights`, if only the tokens `kept` (n, T) count in the mean. verl's agg_loss does so.

    It is 0 for the rest. With `sequence`, 1 / length becomes 1 / number of kept tokens. Length 3, 2 kept: 3/2.
    """
    kept = kept & mask
    counts = kept.sum(1, keepdim=True).clamp(min=1)
    return kept.double() * (mask.sum(1, keepdim=True).double() / counts if loss_agg == "sequence" else 1.0)

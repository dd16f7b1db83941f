"""Losses of policies and critics: pure functions of per-token tensors, one loss per token. They use no process group.

Notation: the ratio of a token is pi(token) / pi_old(token). pi_old is the policy that scored the rollout before the
first update on it. The denominator of the mean is known before the first forward pass, see `token_weights`.

A new policy loss is one function and one entry in POLICY_LOSSES. --policy_loss takes its name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp a log-ratio at +-20 before its exp: e^800 is inf, and inf times an advantage of 0 is NaN.

    The gradient inside the bounds is unchanged, and 0 outside. verl (core_algos.py: policy loss and k3)
    and OpenRLHF (models/loss.py) use the same bounds.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, whether it is clipped) of each token: -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A).

    Schulman et al. 2017, equation 7. eps_high above eps_low is DAPO's clip-higher (Yu et al. 2025, equation 10).
    `dual_clip` c > 1 bounds the loss of a negative advantage by -c A (Ye et al. 2020, equation 5). With c above
    1 + eps_high, this is the two-sided clip of INTELLECT-2 (Prime Intellect 2025). For GSPO (Zheng et
    al. 2025, equation 7), each token's log_ratio is the mean over the tokens of its sequence.
    """
    ratio = bounded(log_ratio).exp()
    free, held = ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    gain = torch.minimum(free, held)
    clipped = held < free
    if dual_clip is not None:
        bound = dual_clip * advantages
        too_low = (advantages < 0) & (gain < bound)
        gain, clipped = torch.where(too_low, bound, gain), clipped | too_low
    return -gain, clipped


def reinforce_loss(log_probs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -A log pi of each token (Williams 1992)."""
    return -advantages * log_probs


def cispo_loss(
    log_probs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, eps_low: float, eps_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, whether the weight is clipped): -sg(clip(ratio, 1 - eps_low, 1 + eps_high)) A log pi.

    sg stops the gradient of the weight only. Every token keeps a gradient (MiniMax-M1, Chen et al. 2025, equations 4
    and 5).
    """
    ratio = bounded(log_ratio.detach()).exp()
    weight = ratio.clamp(1 - eps_low, 1 + eps_high)
    return -weight * advantages * log_probs, weight != ratio


def sapo_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, temperatures: tuple[float, float]) -> torch.Tensor:
    """-4 / t * sigmoid(t (ratio - 1)) A, with t = `temperatures[0]` where A > 0, else `temperatures[1]`.

    A soft gate in place of a clip (SAPO: Gao et al. 2025, Soft adaptive policy optimization).
    """
    t = torch.where(advantages > 0, temperatures[0], temperatures[1])
    return -torch.sigmoid(t * torch.expm1(bounded(log_ratio))) * 4 / t * advantages


def dppo_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, bounds: tuple, divergence: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, whether it is masked): -ratio A, but 0 where an update leads further away than a bound.

    DPPO (arXiv 2602.04879): `divergence(log_probs, old_log_probs)` is of the distribution over (this token, any other).
    `bounds` are (low, high): low where the token became less likely and A <= 0, high where it became more likely and A > 0.
    verl has the same mask. Its ratio is at most 20 and has no gradient of its own; gradients are equal below that.
    """
    new, old = log_probs.detach(), old_log_probs.detach()
    far = divergence(new, old)
    masked = torch.where(advantages > 0, (far > bounds[1]) & (new > old), (far > bounds[0]) & (new < old))
    return torch.where(masked, 0.0, -bounded(log_probs - old_log_probs).exp() * advantages), masked


def binary_tv(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """|p - q|, the total variation of (token, any other)."""
    return (log_probs.exp() - old_log_probs.exp()).abs()


def binary_kl(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """KL(old || new) of (token, any other): q log(q / p) + (1 - q) log((1 - q) / (1 - p))."""
    rest, old_rest = (-torch.expm1(values) for values in (log_probs, old_log_probs))
    of_rest = torch.xlogy(old_rest, old_rest) - torch.xlogy(old_rest, rest)
    return old_log_probs.exp() * (old_log_probs - log_probs) + of_rest


@dataclass(frozen=True)
class PolicyOptions:
    """The name of a loss in POLICY_LOSSES, and its constants. `kl_estimator` is None without a KL term in the loss."""

    loss: str = "ppo"
    loss_agg: str = "token"
    temperature: float = 1.0
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: Optional[float] = None
    kl_estimator: Optional[str] = None
    kl_unbiased: bool = False  # the term times pi / pi_old, with its gradient
    value_clip: Optional[float] = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    off_policy_mask_threshold: Optional[float] = None
    kl_cov_coef: float = 1.0


@dataclass(frozen=True)
class PolicyTokens:
    """The inputs of a policy loss. Tensors are (rows, tokens), fp64.

    `mean_by_sequence(values)` returns the mean over the response tokens of a sequence, at each token of it.
    """

    log_probs: torch.Tensor
    log_ratio: torch.Tensor  # log_probs minus the log-probs of the old policy
    advantages: torch.Tensor
    mean_by_sequence: Callable[[torch.Tensor], torch.Tensor]
    chosen: Optional[torch.Tensor] = (
        None  # clip_cov and kl_cov: True for the tokens of `rollout_corrections.chosen_tokens`
    )


def near_enough(tokens: PolicyTokens, rollout_log_probs: torch.Tensor, threshold: float) -> torch.Tensor:
    """False where A < 0 and the response has drifted: its mean of log pi_rollout - log pi is above `threshold`.

    Such a token has no loss, and counts in the mean (off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1).
    """
    drift = tokens.mean_by_sequence(rollout_log_probs - tokens.log_probs.detach())
    return (tokens.advantages >= 0) | (drift <= threshold)


def _ppo(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    bounds = options.eps_low, options.eps_high, options.dual_clip
    return *ppo_loss(tokens.log_ratio, tokens.advantages, *bounds), tokens.log_ratio


def _reinforce(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    losses = reinforce_loss(tokens.log_probs, tokens.advantages)
    return losses, torch.zeros_like(losses, dtype=torch.bool), tokens.log_ratio


def _gspo(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    log_ratio = tokens.mean_by_sequence(tokens.log_ratio)
    bounds = options.eps_low, options.eps_high, options.dual_clip
    return *ppo_loss(log_ratio, tokens.advantages, *bounds), log_ratio


def _gspo_token(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    """Zheng et al. 2025, equations 13 and 14: the value of the sequence's ratio, with the gradient of each token."""
    mean = tokens.mean_by_sequence(tokens.log_ratio.detach())
    log_ratio = mean + tokens.log_probs - tokens.log_probs.detach()
    return *ppo_loss(log_ratio, tokens.advantages, options.eps_low, options.eps_high, options.dual_clip), log_ratio


def _cispo(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    bounds = options.eps_low, options.eps_high
    return *cispo_loss(tokens.log_probs, tokens.log_ratio, tokens.advantages, *bounds), tokens.log_ratio


def _sapo(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    losses = sapo_loss(tokens.log_ratio, tokens.advantages, options.sapo_temperatures)
    return losses, torch.zeros_like(losses, dtype=torch.bool), tokens.log_ratio


def _dppo(divergence: Callable) -> Callable:
    def loss(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
        old, bounds = tokens.log_probs - tokens.log_ratio, (options.eps_low, options.eps_high)
        return *dppo_loss(tokens.log_probs, old.detach(), tokens.advantages, bounds, divergence), tokens.log_ratio

    return loss


def _clip_cov(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    """Cui et al. 2025, The entropy mechanism of RL (arXiv 2505.22617), section 4.2: as ppo, and chosen tokens have no gradient."""
    losses, clipped, log_ratio = _ppo(tokens, options)
    return torch.where(tokens.chosen, 0.0, losses), clipped | tokens.chosen, log_ratio


def _kl_cov(tokens: PolicyTokens, options: PolicyOptions) -> tuple:
    """The same paper: -ratio A without a clip, and for chosen tokens also kl_cov_coef |log ratio|, as in its code."""
    log_ratio = bounded(tokens.log_ratio)
    away = torch.where(tokens.chosen, options.kl_cov_coef * log_ratio.abs(), 0.0)
    return away - log_ratio.exp() * tokens.advantages, torch.zeros_like(tokens.chosen), tokens.log_ratio


# function(tokens, options) returns for each token (loss, whether it is clipped, log-ratio of the loss)
POLICY_LOSSES: dict[str, Callable[[PolicyTokens, PolicyOptions], tuple]] = {
    "ppo": _ppo,
    "reinforce": _reinforce,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo(binary_tv),
    "dppo_kl": _dppo(binary_kl),
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: Optional[float]
) -> torch.Tensor:
    """Return max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 of each token.

    OpenAI baselines, ppo2; see Engstrom et al. 2020, section 3. Without `value_clip`, the loss is (V - R)^2 / 2.
    """
    losses = (values - returns) ** 2
    if value_clip is not None:
        held = old_values + (values - old_values).clamp(-value_clip, value_clip)
        losses = torch.maximum(losses, (held - returns) ** 2)
    return losses / 2


def differing(scores: torch.Tensor, group_size: int) -> torch.Tensor:
    """(n,) True for the samples of prompts whose scores (n,) are not all equal. A score of NaN is none."""
    groups = scores.view(-1, group_size)
    differ = groups.nan_to_num(-math.inf).amax(1) > groups.nan_to_num(math.inf).amin(1)
    return differ.repeat_interleave(group_size)


def token_weights(lengths: list[int], loss_agg: str, max_len: int, group_size: int = 1) -> list[float]:
    """Return the weight of each sample's tokens in the sum of losses. The mean divides by the sum of `num_targets`.

    token: 1, divided by all tokens (DAPO, equation 8). sequence: 1 / length, by all samples (GRPO, equation 3).
    fixed_length: 1 / max_len, by all samples (Dr. GRPO, Liu et al. 2025, section 3.2). sum: 1, by all samples (the
    response is one action, as in REINFORCE and RLOO: Ahmadian et al. 2024, section 2.2). prompt: 1 / the mean length in its
    group of `group_size`, by all samples (ScaleRL: Khatri et al. 2025, arXiv 2510.13786). A length of 0 has no loss.
    """
    if loss_agg in ("token", "sum"):
        return [1.0] * len(lengths)
    if loss_agg == "prompt":
        groups = [lengths[first : first + group_size] for first in range(0, len(lengths), group_size)]
        return [sum(map(bool, group)) / max(sum(group), 1) for group in groups for _ in group]
    return [1 / (max(length, 1) if loss_agg == "sequence" else max_len) for length in lengths]


def num_targets(length: int, loss_agg: str) -> int:
    """Return what a sample of `length` response tokens adds to the denominator of the loss."""
    return length if loss_agg == "token" else 1

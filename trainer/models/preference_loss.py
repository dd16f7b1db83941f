"""Losses of preferences: pure functions of the log-probs or scores of pairs, one loss per pair. No process group inside.

The denominator of the mean is the number of pairs of the global batch. Notation: w the chosen answer, l the rejected one,
log pi(y) the sum of the log-probs of an answer's tokens, |y| their number.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AnswerLogProbs:
    """Sums of log-probs of the answers of n pairs, and the numbers of their tokens; each (n,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    def mean_chosen(self) -> torch.Tensor:
        return self.chosen / self.chosen_lengths

    def mean_rejected(self) -> torch.Tensor:
        return self.rejected / self.rejected_lengths


def dpo_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """-log sigmoid(beta * margin), margin = log pi/ref(w) - log pi/ref(l) (Rafailov et al. 2023, equation 7)."""
    return -F.logsigmoid(beta * margin)


def cdpo_loss(margin: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO where a label is wrong with probability `label_smoothing` (Mitchell 2023, A note on DPO with noisy preferences)."""
    return (1 - label_smoothing) * dpo_loss(margin, beta) + label_smoothing * dpo_loss(-margin, beta)


def ipo_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """(margin - 1 / (2 beta))^2 on sums of log-probs (Azar et al. 2023, equation 17; beta is their tau)."""
    return (margin - 1 / (2 * beta)) ** 2


def hinge_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """max(0, 1 - beta * margin) (SLiC, Zhao et al. 2023, in the form of Liu et al. 2023, RSO, equation 10)."""
    return torch.relu(1 - beta * margin)


def simpo_loss(policy: AnswerLogProbs, beta: float, gamma: float) -> torch.Tensor:
    """-log sigmoid(beta * (log pi(w) / |w| - log pi(l) / |l|) - gamma) (Meng et al. 2024, equation 6)."""
    return -F.logsigmoid(beta * (policy.mean_chosen() - policy.mean_rejected()) - gamma)


def orpo_loss(policy: AnswerLogProbs, beta: float) -> torch.Tensor:
    """-log pi(w) / |w| - beta * log sigmoid(log odds(w) - log odds(l)) (Hong et al. 2024, equations 4, 6, 7).

    log p(y) is the mean over tokens, odds = p / (1 - p); beta is their lambda.
    """
    log_odds = _log_odds(policy.mean_chosen()) - _log_odds(policy.mean_rejected())
    return -policy.mean_chosen() - beta * F.logsigmoid(log_odds)


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    return log_p - torch.log(-torch.expm1(log_p))


def kto_loss(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    kl: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
    """weight * (1 - sigmoid(+-beta * (log pi/ref(y) - z_0))), + where `desirable` is 1 (Ethayarajh et al. 2024, equation 8).

    One loss per answer; their lambda_y is constant and drops out. `kl` is z_0 >= 0, through which no gradient goes.
    """
    sign = 2 * desirable - 1
    weight = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    return weight * torch.sigmoid(-sign * beta * (log_ratios - kl))  # 1 - sigmoid(x) = sigmoid(-x)


def reward_sigmoid_loss(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r(w) - r(l) - margin) (Touvron et al. 2023, Llama 2, equations 1 and 2)."""
    return -F.logsigmoid(chosen - rejected - margins)


def reward_logexp_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(r(l) - r(w))) (Ouyang et al. 2022, equation 1, written out); equal to the sigmoid form, no margin."""
    return F.softplus(rejected - chosen)

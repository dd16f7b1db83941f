"""Losses of preferences: pure functions of log-probs or scores of pairs, one loss per pair. They use no process group.

The denominator of the mean is the number of pairs in the global batch. Notation: w is the chosen answer and l is the
rejected answer. log pi(y) is the sum of the log-probs of an answer's tokens, and |y| is their number.

A new loss of pairs is one function and one entry in PAIR_LOSSES. A new loss of rewards is one entry in REWARD_LOSSES.
The flag --loss of train_dpo and train_rm takes their names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AnswerLogProbs:
    """The sum of log-probs of each answer of n pairs, and the number of its tokens. Each tensor is (n,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    def mean_chosen(self) -> torch.Tensor:
        return self.chosen / self.chosen_lengths

    def mean_rejected(self) -> torch.Tensor:
        return self.rejected / self.rejected_lengths


@dataclass(frozen=True)
class PreferenceOptions:
    """The name of a loss in PAIR_LOSSES, and the constants that losses use."""

    loss: str
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    nll_loss_coef: float = 0.0


def dpo_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """-log sigmoid(beta * margin), margin = log pi/ref(w) - log pi/ref(l) (Rafailov et al. 2023, equation 7)."""
    return -F.logsigmoid(beta * margin)


def cdpo_loss(margin: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO for labels that are wrong with probability `label_smoothing` (Mitchell 2023, A note on DPO with noisy
    preferences)."""
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

    log p(y) is the mean over tokens, odds = p / (1 - p). beta is their lambda.
    """
    log_odds = _log_odds(policy.mean_chosen()) - _log_odds(policy.mean_rejected())
    return -policy.mean_chosen() - beta * F.logsigmoid(log_odds)


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    log_p = log_p.clamp(max=-torch.finfo(torch.float32).eps)  # p = 1 in fp32 has no finite odds, and a gradient of NaN
    return log_p - torch.log(-torch.expm1(log_p))


@dataclass(frozen=True)
class PairLoss:
    """An entry of PAIR_LOSSES.

    `function(policy, margin, options)` returns one loss per pair, (n,). `policy` is the AnswerLogProbs of the trained
    model. `margin` (n,) is log pi/ref(w) - log pi/ref(l). It is None if the loss needs no reference.
    """

    function: Callable[[AnswerLogProbs, Optional[torch.Tensor], PreferenceOptions], torch.Tensor]
    needs_reference: bool = True


PAIR_LOSSES = {
    "dpo": PairLoss(lambda policy, margin, options: dpo_loss(margin, options.beta)),
    "cdpo": PairLoss(lambda policy, margin, options: cdpo_loss(margin, options.beta, options.label_smoothing)),
    "ipo": PairLoss(lambda policy, margin, options: ipo_loss(margin, options.beta)),
    "hinge": PairLoss(lambda policy, margin, options: hinge_loss(margin, options.beta)),
    "simpo": PairLoss(lambda policy, _, options: simpo_loss(policy, options.beta, options.simpo_gamma), False),
    "orpo": PairLoss(lambda policy, _, options: orpo_loss(policy, options.beta), False),
}


def pair_losses(policy: AnswerLogProbs, margin: Optional[torch.Tensor], options: PreferenceOptions) -> torch.Tensor:
    """Return the loss of each pair, (n,): the loss `options.loss` plus --nll_loss_coef times -log pi(w) / |w|."""
    losses = PAIR_LOSSES[options.loss].function(policy, margin, options)
    if options.nll_loss_coef:  # Pang et al. 2024, Iterative reasoning preference optimization, equation 1
        losses = losses - options.nll_loss_coef * policy.mean_chosen()
    return losses


def kto_loss(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    kl: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
    """weight * (1 - sigmoid(+-beta * (log pi/ref(y) - z_0))), + if `desirable` (Ethayarajh et al. 2024, equation 8).

    One loss per answer. Their lambda_y is constant and drops out. `kl` is z_0 >= 0. No gradient goes through it.
    """
    sign = 2 * desirable - 1
    weight = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    return weight * torch.sigmoid(-sign * beta * (log_ratios - kl))  # 1 - sigmoid(x) = sigmoid(-x)


def reward_sigmoid_loss(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r(w) - r(l) - margin) (Touvron et al. 2023, Llama 2, equations 1 and 2)."""
    return -F.logsigmoid(chosen - rejected - margins)


def reward_logexp_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(r(l) - r(w))) (Ouyang et al. 2022, equation 1). It equals the sigmoid form without a margin."""
    return F.softplus(rejected - chosen)


# function(chosen, rejected, margins), each (n,), returns one loss per pair
REWARD_LOSSES = {
    "sigmoid": reward_sigmoid_loss,
    "logexp": lambda chosen, rejected, _: reward_logexp_loss(chosen, rejected),
}

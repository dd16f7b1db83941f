"""Losses of preferences: pure functions of log-probs or scores of pairs, one loss per pair. They use no process group.

The denominator of the mean is the number of pairs in the global batch. Notation: w is the chosen answer and l is the
rejected answer. log pi(y) is the sum of the log-probs of an answer's tokens, and |y| is their number.

A new loss of pairs is one function and one entry in PAIR_LOSSES. A new loss of rewards is one entry in REWARD_LOSSES.
The flag --loss of train_dpo and train_rm takes their names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from trainer.comma_separated import names_in


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
    """The names of losses in PAIR_LOSSES (comma-separated), their weights (None: 1 each), and the constants they use."""

    loss: str
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    nll_loss_coef: float = 0.0
    weights: Optional[tuple[float, ...]] = None
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5


@dataclass(frozen=True)
class LogRatios:
    """log pi/ref of the chosen and of the rejected answers, each (n,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor


def f_score(log_ratio: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """f'(t) of t = pi/ref, without constants that cancel in a difference (Wang et al. 2024, Beyond reverse KL).

    reverse_kl: log t. forward_kl: -1/t. js: log(2t / (1 + t)). alpha: (t^(alpha - 1) - 1) / (alpha - 1); 1 is reverse_kl.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence == "alpha" and alpha != 1:
        return torch.expm1((alpha - 1) * log_ratio) / (alpha - 1)
    return log_ratio


def dpo_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """-log sigmoid(beta * margin), margin = log pi/ref(w) - log pi/ref(l) (Rafailov et al. 2023, equation 7)."""
    return -F.logsigmoid(beta * margin)


def cdpo_loss(margin: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO for labels that are wrong with probability `label_smoothing` (Mitchell 2023, A note on DPO with noisy
    preferences)."""
    return (1 - label_smoothing) * dpo_loss(margin, beta) + label_smoothing * dpo_loss(-margin, beta)


def robust_loss(margin: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """An unbiased estimate of the DPO loss if labels are wrong with probability `label_smoothing` (Chowdhury et al. 2024,
    Provably robust DPO)."""
    right, wrong = dpo_loss(margin, beta), dpo_loss(-margin, beta)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


def ipo_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """(margin - 1 / (2 beta))^2 on sums of log-probs (Azar et al. 2023, equation 17; beta is their tau)."""
    return (margin - 1 / (2 * beta)) ** 2


def hinge_loss(margin: torch.Tensor, beta: float) -> torch.Tensor:
    """max(0, 1 - beta * margin) (SLiC, Zhao et al. 2023, in the form of Liu et al. 2023, RSO, equation 10)."""
    return torch.relu(1 - beta * margin)


def apo_zero_loss(ratios: LogRatios, beta: float) -> torch.Tensor:
    """1 - sigmoid(beta r_w) + sigmoid(beta r_l), r = log pi/ref (D'Oosterlinck et al. 2024, equation 7): the chosen answer
    gets more likely, the rejected one less."""
    return torch.sigmoid(-beta * ratios.chosen) + torch.sigmoid(beta * ratios.rejected)


def apo_down_loss(ratios: LogRatios, beta: float) -> torch.Tensor:
    """sigmoid(beta r_w) + 1 - sigmoid(beta (r_w - r_l)) (D'Oosterlinck et al. 2024, equation 8): both get less likely, the
    rejected answer by more."""
    return torch.sigmoid(beta * ratios.chosen) + torch.sigmoid(-beta * (ratios.chosen - ratios.rejected))


def sppo_loss(ratios: LogRatios, beta: float) -> torch.Tensor:
    """(r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2 (Wu et al. 2024, SPPO, equation 4.7 with P = 1; beta is 1 / eta)."""
    return (ratios.chosen - 0.5 / beta) ** 2 + (ratios.rejected + 0.5 / beta) ** 2


def nca_loss(ratios: LogRatios, beta: float) -> torch.Tensor:
    """-log sigmoid(beta r_w) - (log sigmoid(-beta r_w) + log sigmoid(-beta r_l)) / 2 (Chen et al. 2024, NCA, for
    pairs)."""
    chosen, rejected = beta * ratios.chosen, beta * ratios.rejected
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def bco_loss(ratios: LogRatios, beta: float) -> torch.Tensor:
    """-log sigmoid(beta r_w) - log sigmoid(-beta r_l) (Jung et al. 2024, BCO), without their reward shift, as in MPO and
    TRL's bco_pair."""
    return -F.logsigmoid(beta * ratios.chosen) - F.logsigmoid(-beta * ratios.rejected)


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

    `function(policy, ratios, margin, options)` returns one loss per pair, (n,). `policy` is the AnswerLogProbs of the
    trained model. `margin` (n,) is log pi/ref(w) - log pi/ref(l), or the difference of scores of another f-divergence.
    It and `ratios` are None if the loss needs no reference. Only a loss with `of_margin` fits other f-divergences: their
    scores have a constant, which cancels only in differences.
    """

    function: Callable[[AnswerLogProbs, Optional[LogRatios], Optional[torch.Tensor], PreferenceOptions], torch.Tensor]
    needs_reference: bool = True
    of_margin: bool = False
    has_label_smoothing: bool = False


def _of_margin(function: Callable, has_label_smoothing: bool = False) -> PairLoss:
    def loss(_policy, _ratios, margin, options):
        more = (options.label_smoothing,) if has_label_smoothing else ()
        return function(margin, options.beta, *more)

    return PairLoss(loss, of_margin=True, has_label_smoothing=has_label_smoothing)


def _of_ratios(function: Callable) -> PairLoss:
    return PairLoss(lambda _policy, ratios, _margin, options: function(ratios, options.beta))


PAIR_LOSSES = {
    "dpo": _of_margin(dpo_loss),
    "cdpo": _of_margin(cdpo_loss, has_label_smoothing=True),
    "robust": _of_margin(robust_loss, has_label_smoothing=True),
    "ipo": _of_margin(ipo_loss),
    "hinge": _of_margin(hinge_loss),
    "apo_zero": _of_ratios(apo_zero_loss),
    "apo_down": _of_ratios(apo_down_loss),
    "sppo": _of_ratios(sppo_loss),
    "nca": _of_ratios(nca_loss),
    "bco": _of_ratios(bco_loss),
    "simpo": PairLoss(lambda policy, _r, _m, options: simpo_loss(policy, options.beta, options.simpo_gamma), False),
    "orpo": PairLoss(lambda policy, _r, _m, options: orpo_loss(policy, options.beta), False),
}


def pair_losses(policy: AnswerLogProbs, ratios: Optional[LogRatios], options: PreferenceOptions) -> torch.Tensor:
    """Return the loss of each pair, (n,): the weighted sum of the losses that `options.loss` names.

    --nll_loss_coef adds -log pi(w) / |w| times it (Pang et al. 2024, Iterative reasoning preference optimization, equation
    1). A sum of dpo, bco and this term is MPO (Wang et al. 2024, Mixed preference optimization).
    """
    names, margin = names_in(options.loss), None
    if ratios is not None:
        chosen, rejected = (f_score(r, options.f_divergence, options.f_alpha) for r in (ratios.chosen, ratios.rejected))
        margin = chosen - rejected
    losses = sum(
        weight * PAIR_LOSSES[name].function(policy, ratios, margin, options)
        for name, weight in zip(names, options.weights or [1.0] * len(names))
    )
    if options.nll_loss_coef:
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

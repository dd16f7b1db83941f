"""Losses against TRL's own code: the lines of its trainers that compute them, run on random and on extreme numbers."""

import inspect
import itertools
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from trainer.methods import advantages as adv
from trainer.models.losses.policy_loss import POLICY_LOSSES, PolicyOptions, PolicyTokens
from trainer.models.losses.preference_loss import PAIR_LOSSES, AnswerLogProbs, LogRatios, PreferenceOptions, pair_losses

trl = pytest.importorskip("trl")
nanstd = pytest.importorskip("trl.trainer.utils").nanstd

NAMES = {  # ours: TRL's
    "dpo": "sigmoid", "cdpo": None, "robust": "robust", "hinge": "hinge", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "sppo": "sppo_hard", "nca": "nca_pair", "bco": "bco_pair",
}  # fmt: skip
DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js": "js_divergence",
    "alpha": "alpha_divergence",
}


def lines_between(function, first: str, last: str, known: dict) -> dict:
    """Run the lines of a function of TRL from the one that starts with `first` to that before `last`."""
    lines = inspect.getsource(function).splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith(first))
    end = next(n for n, line in enumerate(lines) if n > start and line.strip().startswith(last))
    exec(textwrap.dedent("\n".join(lines[start:end])), known)
    return known


def theirs(loss: str, chosen, rejected, *, beta, smoothing, divergence="reverse_kl", alpha=0.5) -> torch.Tensor:
    options = {"loss_types": [loss], "loss_weights": [1.0], "beta": beta, "label_smoothing": smoothing}
    options |= {"f_divergence_type": DIVERGENCES[divergence], "f_alpha_divergence_coef": alpha}
    known = {"self": SimpleNamespace(**options), "chosen_logratios": chosen, "rejected_logratios": rejected}
    known |= {"torch": torch, "F": F, "math": math, "device": "cpu"}
    function = trl.DPOTrainer._compute_loss
    return lines_between(function, "if self.f_divergence_type", "if self.use_weighting", known)["per_sequence_loss"]


def ratios() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = 4 * torch.randn(2, 64, generator=generator)
    chosen[:3], rejected[:3] = torch.tensor([0.0, 30.0, -30.0]), torch.tensor([0.0, -30.0, 30.0])
    return chosen, rejected


CASES = [(name, "reverse_kl") for name in NAMES if NAMES[name]]
CASES += [(name, divergence) for name in ("dpo", "hinge", "robust") for divergence in ("forward_kl", "js", "alpha")]


@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_losses_of_pairs(name, divergence):
    smoothing = 0.2 if PAIR_LOSSES[name].has_label_smoothing else 0.0
    for beta in (0.1, 1.5):
        chosen, rejected = (values.requires_grad_() for values in ratios())
        options = PreferenceOptions(name, beta, smoothing, f_divergence=divergence, f_alpha=0.3)
        ones = torch.ones_like(chosen)
        found = pair_losses(AnswerLogProbs(chosen, rejected, ones, ones), LogRatios(chosen, rejected), options)
        more = {"beta": beta, "smoothing": smoothing, "divergence": divergence, "alpha": 0.3}
        expected = theirs(NAMES[name], chosen, rejected, **more)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        grads = [
            torch.autograd.grad(values.sum(), (chosen, rejected), allow_unused=True) for values in (found, expected)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_a_sum_of_losses_is_mpo():
    """0.8 dpo + 0.2 bco + the mean log-prob of the chosen answer: Wang et al. 2024."""
    chosen, rejected = ratios()
    lengths = torch.arange(1.0, 65)
    policy = AnswerLogProbs(chosen - 70, rejected - 70, lengths, lengths)
    options = PreferenceOptions("dpo, bco", 0.1, nll_loss_coef=1.0, weights=(0.8, 0.2))
    parts = [theirs(name, chosen, rejected, beta=0.1, smoothing=0.0) for name in ("sigmoid", "bco_pair")]
    expected = 0.8 * parts[0] + 0.2 * parts[1] - (chosen - 70) / lengths
    torch.testing.assert_close(pair_losses(policy, LogRatios(chosen, rejected), options), expected)


# --- policies


def tokens_of(size: float) -> PolicyTokens:
    generator = torch.Generator().manual_seed(2)
    log_ratio, advantages = torch.randn(2, 4, 50, generator=generator, dtype=torch.float64)
    log_ratio = (size * log_ratio).requires_grad_()
    return PolicyTokens(log_ratio, log_ratio, advantages, lambda values: values)


@pytest.mark.parametrize(("ours", "kind"), [("sapo", "sapo"), ("ppo", "dapo")])
@pytest.mark.parametrize("size", [0.1, 2.0])
def test_soft_gates_and_the_two_sided_clip(ours, kind, size):
    """With `delta`, TRL clips the unclipped ratio too. --dual_clip does the same."""
    for temperatures, delta in itertools.product([(1.0, 1.05), (0.5, 3.0)], [1.5, 4.0]):
        tokens = tokens_of(size)
        options = PolicyOptions(ours, eps_high=0.28, dual_clip=delta, sapo_temperatures=temperatures)
        found, *_ = POLICY_LOSSES[ours](tokens, options)
        more = {"delta": delta, "sapo_temperature_pos": temperatures[0], "sapo_temperature_neg": temperatures[1]}
        trainer = SimpleNamespace(loss_type=kind, epsilon_low=0.2, epsilon_high=0.28, args=SimpleNamespace(**more))
        known = {"self": trainer, "torch": torch, "coef_1": tokens.log_ratio.exp(), "advantages": tokens.advantages}
        function = trl.GRPOTrainer._compute_loss
        expected = lines_between(function, 'if self.loss_type == "cispo"', "if self.off_policy_mask_threshold", known)
        torch.testing.assert_close(found, expected["per_token_loss"], rtol=1e-9, atol=1e-12)
        grads = [torch.autograd.grad(v.sum(), tokens.log_ratio)[0] for v in (found, expected["per_token_loss"])]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


def branch_of_advantages(aggregation: str):
    """The lines of TRL that make advantages of scores, compiled, with our epsilon: its own is 1e-4."""
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions).replace("1e-4", "1e-6")
    lines = source.splitlines()
    start = next(n for n, line in enumerate(lines) if f'== "{aggregation}"' in line) + 1
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next(n for n, line in enumerate(lines) if n > start and line.strip() and not line.startswith(" " * indent))
    return compile(textwrap.dedent("\n".join(lines[start:end])), "trl", "exec")


@pytest.mark.parametrize("scale", ["batch", "group", "none"])
def test_scores_are_compared_as_by_scale_rewards(scale):
    """--advantage_batch_std, group_norm and dr_grpo on 200 random and extreme rollouts, of which some lack scores."""
    body, generator = branch_of_advantages("sum_then_normalize"), torch.Generator().manual_seed(3)
    for number in range(200):
        scores = torch.randn(24, generator=generator, dtype=torch.float64) * (1.0, 1e-4, 1e6)[number % 3]
        scores = (scores > 0).double() if number % 2 else scores  # groups of equal scores, too
        scores[torch.rand(24, generator=generator) < 0.2 * (number % 4 == 3)] = math.nan
        trainer = SimpleNamespace(reward_weights=torch.ones(1, dtype=torch.float64), scale_rewards=scale)
        known = {"self": trainer, "torch": torch, "device": "cpu", "num_generations": 4, "nanstd": nanstd}
        exec(body, known | {"rewards_per_func": scores[:, None], "unscorable_mask": scores.isnan()}, found := {})
        estimator = "dr_grpo" if scale == "none" else "group_norm"
        own = adv.compare_in_groups(scores, estimator, 4, batch_std=scale == "batch")
        torch.testing.assert_close(own, found["advantages"].nan_to_num(), rtol=1e-6, atol=1e-6)


def test_rewards_that_are_normalised_apart():
    """multi_objective_aggregation="normalize_then_sum" of TRL, with our epsilon."""
    body = branch_of_advantages("normalize_then_sum")
    generator = torch.Generator().manual_seed(5)
    for number in range(200):
        rewards = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        if number % 2:
            rewards = (rewards > 0).double()  # groups of equal scores, too
        rewards[:, 1] *= (1.0, 1e-3, 1e6)[number % 3]
        rewards[torch.rand(12, 3, generator=generator) < 0.1 * (number % 4 == 3)] = math.nan  # None of a function
        weights = torch.tensor([1.0, 0.25, -2.0], dtype=torch.float64)
        trainer = SimpleNamespace(reward_funcs=range(3), reward_weights=weights)
        known = {"self": trainer, "torch": torch, "device": "cpu", "num_generations": 4, "rewards_per_func": rewards}
        known |= {"nanstd": nanstd, "unscorable_mask": rewards.isnan().all(1)}
        exec(body, known)
        found = adv.normalized_apart(rewards, weights, 4)
        torch.testing.assert_close(found.nan_to_num(), known["advantages"].nan_to_num(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_responses_far_from_their_rollout_are_rejected(estimator):
    generator, lengths = torch.Generator().manual_seed(4), [3, 1, 5, 4]
    mask = adv.rows_mask(lengths)
    rollout, training = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    kls = []
    for row, length in enumerate(lengths):
        total = 0.0
        for p, q in zip(rollout[row, :length].tolist(), training[row, :length].tolist()):
            total += {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}[estimator]
        kls.append(abs(total / length))
    most = sum(kls) / 4
    found = adv.within_kl(rollout, training, mask, estimator, most)
    assert found.tolist() == [kl <= most for kl in kls] and 0 < found.sum() < 4

"""Losses of pairs: the formulas of the papers in plain Python, gradients by finite differences, and log-probs."""

import math

import pytest
import torch
from tiny_models import make_model

from trainer.datasets.samples.preference import collate_pairs
from trainer.methods.dpo import answer_log_probs
from trainer.models.attention.choice import resolve_attention
from trainer.models.losses import preference_loss
from trainer.models.losses.preference_loss import (
    AnswerLogProbs,
    LogRatios,
    PreferenceOptions,
    pair_losses,
    reward_logexp_loss,
    reward_sigmoid_loss,
)
from trainer.models.losses.sequence_sums import counts_here, sum_by_sequence
from trainer.models.losses.token_losses import token_log_probs

W, L, REF_W, REF_L, LEN_W, LEN_L = -12.0, -15.5, -13.0, -14.25, 6.0, 9.0


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def paper(loss: str, w: float, r: float, beta: float, smooth: float, gamma: float) -> float:
    """Return the loss of one pair as the papers write it. trainer/models/losses/preference_loss.py names the papers."""
    ratio = (w - REF_W) - (r - REF_L)
    if loss in ("dpo", "cdpo"):
        return -(1 - smooth) * math.log(sigmoid(beta * ratio)) - smooth * math.log(1 - sigmoid(beta * ratio))
    if loss == "ipo":
        return (ratio - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return max(0.0, 1 - beta * ratio)
    if loss == "simpo":
        return -math.log(sigmoid(beta / LEN_W * w - beta / LEN_L * r - gamma))
    p_w, p_r = math.exp(w / LEN_W), math.exp(r / LEN_L)
    odds_ratio = p_w / (1 - p_w) / (p_r / (1 - p_r))
    return -w / LEN_W - beta * math.log(sigmoid(math.log(odds_ratio)))


@pytest.mark.parametrize("loss", ["dpo", "cdpo", "ipo", "hinge", "simpo", "orpo"])
@pytest.mark.parametrize("nll", [0.0, 0.5])
def test_values_and_gradients_are_the_papers(loss, nll):
    smooth = 0.2 if loss == "cdpo" else 0.0
    chosen, rejected = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (W, L))
    lengths = [torch.tensor([x], dtype=torch.float64) for x in (LEN_W, LEN_L)]
    options = PreferenceOptions(loss, 0.3, smooth, 0.7, nll)
    value = pair_losses(
        AnswerLogProbs(chosen, rejected, *lengths), LogRatios(chosen - REF_W, rejected - REF_L), options
    )

    def plain(w: float, r: float) -> float:
        return paper(loss, w, r, 0.3, smooth, 0.7) - nll * w / LEN_W

    assert value.item() == pytest.approx(plain(W, L), rel=1e-12)
    value.sum().backward()
    step = 1e-5
    numeric = (
        (plain(W + step, L) - plain(W - step, L)) / (2 * step),
        (plain(W, L + step) - plain(W, L - step)) / (2 * step),
    )
    found = [0.0 if x.grad is None else x.grad.item() for x in (chosen, rejected)]
    assert found == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def test_the_gradient_of_orpo_is_finite_where_an_answer_is_certain():
    """log p = 0: the odds are infinite. fp32 rounds every p above 1 - 6e-8 to 1, so this happens."""
    chosen, rejected = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.0, L))
    lengths = torch.tensor([LEN_W], dtype=torch.float64)
    value = preference_loss.orpo_loss(AnswerLogProbs(chosen, rejected, lengths, lengths), 0.3)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(chosen.grad).all() and torch.isfinite(rejected.grad).all()


@pytest.mark.parametrize("z_0", [0.0, 0.4])
@pytest.mark.parametrize("desirable", [True, False])
def test_kto_is_the_papers_value_function(desirable, z_0):
    """L = lambda_y - v(x, y): Ethayarajh et al. 2024, equation 8."""
    beta, weights, r = 0.3, {True: 1.2, False: 0.7}, 1.7

    def plain(x: float) -> float:
        v = weights[desirable] * (sigmoid(beta * (x - z_0)) if desirable else sigmoid(beta * (z_0 - x)))
        return weights[desirable] - v

    ratio = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([float(desirable)], dtype=torch.float64)
    value = preference_loss.kto_loss(ratio, label, z_0, beta, weights[True], weights[False])
    assert value.item() == pytest.approx(plain(r), rel=1e-12)
    value.sum().backward()
    numeric = (plain(r + 1e-5) - plain(r - 1e-5)) / 2e-5
    assert ratio.grad.item() == pytest.approx(numeric, rel=1e-6) and numeric * (1 if desirable else -1) < 0


def test_reward_losses():
    chosen, rejected, margins = (torch.tensor(x, dtype=torch.float64) for x in ([1.5, -2.0], [0.5, 1.0], [0.25, 0.0]))
    expected = [-math.log(sigmoid(1.0 - 0.25)), -math.log(sigmoid(-3.0))]
    assert reward_sigmoid_loss(chosen, rejected, margins).tolist() == pytest.approx(expected, rel=1e-12)
    expected = [math.log(1 + math.exp(-1.0)), math.log(1 + math.exp(3.0))]
    assert reward_logexp_loss(chosen, rejected).tolist() == pytest.approx(expected, rel=1e-12)


def test_losses_stay_finite_where_the_papers_overflow():
    far = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    for value in (preference_loss.dpo_loss(far, 1.0), reward_logexp_loss(far, -far)):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_log_probs_of_chunks_are_those_of_the_whole(chunk):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.tensor([[3, -100, 0, 10, -100], [-100, -100, -100, 7, 2]])
    plain = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    weights = torch.randn(2, 5)
    (expected,) = torch.autograd.grad((plain * weights).sum(), logits)
    found = token_log_probs(logits, labels, chunk)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_sequence_sums_without_a_group():
    values, ids = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 1, 0]])
    assert sum_by_sequence(values, ids, 2, None).tolist() == [5.0, 2.0]
    assert sum_by_sequence(values, ids * 0, 0, None).shape == (0,)
    assert counts_here(None) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_without_a_pair_goes_through_the_same_forward_pass(packed):
    """A short last batch gives a rank an empty micro-batch: sums over no pairs, gradients of zero."""
    model = make_model("llama")
    model.set_attn_implementation(resolve_attention("sdpa", packed))
    log_probs = answer_log_probs(model, collate_pairs([], 0, packed), None)
    assert [value.shape for value in (log_probs.chosen, log_probs.rejected)] == [(0,), (0,)]
    assert [value.shape for value in (log_probs.chosen_lengths, log_probs.rejected_lengths)] == [(0,), (0,)]
    log_probs.chosen.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())

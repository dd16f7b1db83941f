"""Distances from a teacher against formulas of plain numbers and TRL's code; test_entropies.py has them by columns."""

import math

import pytest
import torch

from trainer.models.losses.distances import DISTANCES, Distance, distances

KINDS = [("kl", 0.5), ("reverse_kl", 0.5), *(("jsd", beta) for beta in (0, 0.1, 0.5, 0.9, 1))]


def inputs(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of (model, teacher), 3 rows of 2 to 9 columns: equal, near, far, and so large that all but one token has p = 0."""
    generator = torch.Generator().manual_seed(number)
    model, teacher = torch.randn(2, 3, 2 + number % 8, generator=generator, dtype=torch.float64)
    scale = (1.0, 1e-4, 8.0, 300.0, 1e4)[number % 5]
    return scale * model + 1e3 * (number % 3), model if number % 11 == 0 else scale * teacher


def plain(model: list[float], teacher: list[float], name: str, beta: float, top_k=None) -> float:
    """Sums of a log(a / b), number by number."""

    def log_probs(logits):
        largest = max(logits)
        return [x - largest - math.log(math.fsum(math.exp(y - largest) for y in logits)) for x in logits]

    def kl(log_a, log_b):
        return math.fsum(math.exp(a) * (a - b) for a, b in zip(log_a, log_b))

    def plus(values):
        largest = max(values)
        return largest + math.log(math.fsum(math.exp(value - largest) for value in values))

    log_p, log_q = log_probs(teacher), log_probs(model)
    if top_k is not None:
        order = sorted(range(len(log_p)), key=lambda token: -log_p[token])
        top, rest = order[: min(top_k, len(order) - 1)], order[min(top_k, len(order) - 1) :]
        log_p, log_q = ([*(x[t] for t in top), plus([x[t] for t in rest])] for x in (log_p, log_q))
    if name == "kl" or (name, beta) == ("jsd", 0):
        return kl(log_p, log_q)
    if name == "reverse_kl" or (name, beta) == ("jsd", 1):
        return kl(log_q, log_p)
    mixture = [plus([math.log(beta) + p, math.log(1 - beta) + q]) for p, q in zip(log_p, log_q)]
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


@pytest.mark.parametrize(("name", "beta"), KINDS)
def test_distances_are_those_of_plain_sums_and_of_trl(name, beta):
    jsd = pytest.importorskip("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss
    assert set(DISTANCES) == {name for name, _ in KINDS}
    for number in range(200):
        model, teacher = inputs(number)
        for top_k in (None, 1, 3, 99):
            found = distances(model, teacher, Distance(name, beta, top_k))
            for row, value in enumerate(found.tolist()):
                expected = plain(model[row].tolist(), teacher[row].tolist(), name, beta, top_k)
                assert value == pytest.approx(expected, rel=1e-9, abs=1e-10)
        trl_beta = {"kl": 0, "reverse_kl": 1, "jsd": beta}[name]
        theirs = jsd(model[None], teacher[None], beta=trl_beta, reduction="sum").item()
        # TRL keeps beta as fp32
        assert distances(model, teacher, Distance(name, beta)).sum().item() == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("name", "beta"), KINDS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_gradients_are_finite_differences(name, beta, top_k):
    model, teacher = inputs(5)
    kind = Distance(name, beta, top_k)
    assert torch.autograd.gradcheck(lambda logits: distances(logits, teacher, kind), model.requires_grad_())


def test_tokens_that_both_rule_out_do_not_count():
    model, teacher = inputs(2)
    ruled_out = torch.full((3, 2), -math.inf, dtype=torch.float64)
    for (name, beta), top_k in ((kind, k) for kind in KINDS for k in (None, 2)):
        kind = Distance(name, beta, top_k)
        wide = torch.cat([model, ruled_out], 1).requires_grad_()
        found = distances(wide, torch.cat([teacher, ruled_out], 1), kind)
        torch.testing.assert_close(found, distances(model, teacher, kind))
        found.sum().backward()
        assert wide.grad.isfinite().all()

"""Policy and value losses, compared with the formulas of the papers, one token at a time in plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.methods.advantages import AdvantageOptions, kl_estimate
from trainer.methods.ppo_state import PPOOptions
from trainer.methods.rollout_corrections import chosen_tokens
from trainer.models.losses import policy_loss as losses

numbers = st.floats(-2, 2, allow_nan=False)
tokens = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)


def columns(rows) -> list[torch.Tensor]:
    return list(torch.tensor(rows, dtype=torch.float64).T)


def ppo_by_cases(ratio: float, advantage: float, low: float, high: float) -> float:
    """Schulman et al. 2017, figure 1: the gain is flat above 1 + eps for A > 0 and below 1 - eps for A < 0."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * max(ratio, 1 - low)


@settings(max_examples=60, deadline=None)
@given(tokens, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_ppo_clip(rows, low, high):
    log_ratio, advantages = columns(rows)
    loss, clipped = losses.ppo_loss(log_ratio, advantages, low, high)
    for value, was_clipped, (r, a) in zip(loss.tolist(), clipped.tolist(), rows):
        assert value == pytest.approx(ppo_by_cases(math.exp(r), a, low, high), rel=1e-9, abs=1e-12)
        outside = math.exp(r) > 1 + high if a > 0 else math.exp(r) < 1 - low
        assert was_clipped == (outside and abs(a) > 1e-300) or abs(a) <= 1e-300


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_dual_clip_bounds_the_loss_of_negative_advantages_alone(rows):
    log_ratio, advantages = columns(rows)
    free, _ = losses.ppo_loss(log_ratio, advantages, 0.2, 0.2)
    held, _ = losses.ppo_loss(log_ratio, advantages, 0.2, 0.2, dual_clip=3.0)
    for a, before, after in zip(advantages.tolist(), free.tolist(), held.tolist()):
        assert after == pytest.approx(min(before, -3 * a) if a < 0 else before)


def test_clipped_tokens_have_no_gradient_and_on_policy_ones_that_of_reinforce():
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    old = torch.tensor([-1.0, -3.0, -0.5])
    advantages = torch.tensor([0.7, 1.0, -2.0])
    loss, clipped = losses.ppo_loss(log_probs - old, advantages, 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [False, True, False]
    assert log_probs.grad.tolist() == pytest.approx([-0.7, 0.0, 2.0])
    again = log_probs.detach().clone().requires_grad_(True)
    losses.reinforce_loss(again, advantages).sum().backward()
    assert again.grad.tolist() == pytest.approx([-0.7, -1.0, 2.0])


@settings(max_examples=60, deadline=None)
@given(tokens)
def test_cispo_keeps_a_gradient_for_every_token(rows):
    log_ratio, advantages = columns(rows)
    log_probs = (log_ratio - 2.5).requires_grad_(True)
    loss, clipped = losses.cispo_loss(log_probs, log_ratio, advantages, 0.2, 0.3)
    loss.sum().backward()
    for i, (r, a) in enumerate(rows):
        weight = min(max(math.exp(r), 0.8), 1.3)
        assert loss[i].item() == pytest.approx(-weight * a * (r - 2.5), abs=1e-9)
        assert log_probs.grad[i].item() == pytest.approx(-weight * a, abs=1e-9)
        assert clipped[i].item() == (math.exp(r) < 0.8 or math.exp(r) > 1.3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20), st.floats(0.1, 1))
def test_the_value_loss_is_the_worse_of_free_and_clipped(rows, clip):
    values, old, returns = columns(rows)
    loss, free = losses.value_loss(values, old, returns, clip), losses.value_loss(values, old, returns, None)
    for i, (v, o, g) in enumerate(rows):
        held = min(max(v, o - clip), o + clip)
        assert loss[i].item() == pytest.approx(max((v - g) ** 2, (held - g) ** 2) / 2, abs=1e-9)
        assert free[i].item() == pytest.approx((v - g) ** 2 / 2, abs=1e-9)


@pytest.mark.parametrize("loss_agg", ["token", "sequence", "fixed_length"])
def test_the_three_means(loss_agg):
    """Average the token losses of three samples as each paper does."""
    samples = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]]
    lengths, max_len = [len(sample) for sample in samples], 8
    weights = losses.token_weights(lengths, loss_agg, max_len)
    total = sum(weight * sum(sample) for weight, sample in zip(weights, samples))
    mean = total / sum(losses.num_targets(length, loss_agg) for length in lengths)
    expected = {"token": 21 / 6, "sequence": (1.5 + 3 + 5) / 3, "fixed_length": (3 / 8 + 3 / 8 + 15 / 8) / 3}
    assert mean == pytest.approx(expected[loss_agg])


@pytest.mark.parametrize("size", [-800.0, -20.5, -19.5, 0.3, 19.5, 20.5, 800.0])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_huge_log_ratio_is_finite_and_the_gradient_inside_the_bounds_is_that_of_the_formula(size, advantage):
    """One token whose policy is e^size times as likely as the old one, or the reference e^size times as the policy."""
    held = min(max(size, -20), 20)
    for name, formula in {
        "ppo": lambda x: losses.ppo_loss(x, torch.tensor([advantage], dtype=x.dtype), 1e-9, 1e9),  # clips nothing
        "cispo": lambda x: losses.cispo_loss(x, x, torch.tensor([advantage], dtype=x.dtype), 1, 1e9),
        "k3": lambda x: (kl_estimate(-x, torch.zeros_like(x), "k3"), None),
    }.items():
        log_ratio = torch.tensor([size], dtype=torch.float64, requires_grad=True)
        loss, _ = formula(log_ratio)
        [gradient] = torch.autograd.grad(loss.sum(), log_ratio)
        assert loss.isfinite().all() and gradient.isfinite().all(), (name, loss, gradient)
        if name == "k3":
            assert loss.item() == pytest.approx(math.expm1(held) - held)
            assert gradient.item() == pytest.approx(math.expm1(size) if abs(size) < 20 else 0)
        elif name == "cispo":
            assert gradient.item() == pytest.approx(-advantage * math.exp(held))
        elif advantage > 0 or size > 0:
            assert loss.item() == pytest.approx(-advantage * math.exp(held))
            assert gradient.item() == pytest.approx(-advantage * math.exp(size) if abs(size) < 20 else 0)


def test_dppo_on_200_random_and_extreme_tokens():
    """arXiv 2602.04879, one token at a time with plain probabilities: what leads away from the old policy is masked."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, 200, generator=generator, dtype=torch.float64)
    uniform[:, :8] = torch.tensor(
        [[1e-300, 1.0, 0.5, 0.999999, 1e-9, 0.5, 1.0, 0.5], [0.5, 0.5, 1e-300, 1e-9, 1.0, 1.0, 1.0, 0.5]],
        dtype=torch.float64,
    )
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    advantages[10] = 0.0
    new, old = uniform.log()
    new.requires_grad_()
    tokens = losses.PolicyTokens(new, new - old, advantages, lambda values: values)
    options = losses.PolicyOptions(eps_low=0.15, eps_high=0.25)
    for name in ("dppo_tv", "dppo_kl"):
        found, masked, _ = losses.POLICY_LOSSES[name](tokens, options)
        [gradient] = torch.autograd.grad(found.sum(), new)
        expected, slopes, flags = [], [], []
        for p, q, a in zip(*uniform.tolist(), advantages.tolist()):
            far = abs(p - q)
            if name == "dppo_kl":
                far = q * math.log(q / p) + (
                    (1 - q) * (math.log((1 - q) / (1 - p)) if p < 1 else math.inf) if q < 1 else 0
                )
            away, bound = (p > q, 0.25) if a > 0 else (p < q, 0.15)
            value = 0.0 if away and far > bound else -min(max(p / q, math.exp(-20)), math.exp(20)) * a
            expected.append(value)
            slopes.append(value if abs(math.log(p / q)) <= 20 else 0.0)
            flags.append(away and far > bound)
        assert masked.tolist() == flags and 10 < sum(flags) < 150
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-6)


def covariance_options(loss: str, **more) -> PPOOptions:
    options = AdvantageOptions("group_norm"), losses.PolicyOptions(loss, kl_cov_coef=0.7)
    return PPOOptions(*options, None, seed=3, **more)


def test_clip_cov_and_kl_cov_on_200_random_and_extreme_rollouts():
    """Cui et al. 2025 (arXiv 2505.22617), one token at a time, with the choice of verl's core_algos: a share, at least 1."""
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        count, size = (1, 7, 50, 400)[number % 4], (0.1, 1.0, 30.0)[number % 3]
        new, old, advantages = size * torch.randn(3, count, generator=generator, dtype=torch.float64)
        new, share = new.requires_grad_(), (0.002, 0.3)[number % 2]
        middle = statistics.fmean(old.tolist()), statistics.fmean(advantages.tolist())
        found = [(p - middle[0]) * (a - middle[1]) for p, a in zip(old.tolist(), advantages.tolist())]
        most = max(1, int(share * count))
        for name in ("clip_cov", "kl_cov"):
            options = covariance_options(name, cov_share=share, cov_range=(0.5, 5.0))
            chosen = chosen_tokens(old, advantages, options, number)
            if name == "kl_cov":
                largest = sorted(range(count), key=lambda n: -found[n])[:most]
                assert chosen.nonzero().flatten().tolist() == sorted(largest)
            else:
                inside = [n for n in range(count) if 0.5 < found[n] < 5.0]
                assert {*chosen.nonzero().flatten().tolist()} <= {*inside} and chosen.sum() == min(most, len(inside))
            tokens = losses.PolicyTokens(new, new - old, advantages, lambda values: values, chosen)
            values, clipped, _ = losses.POLICY_LOSSES[name](tokens, options.policy)
            [gradient] = torch.autograd.grad(values.sum(), new)
            for n, (r, a) in enumerate(zip((new - old).tolist(), advantages.tolist())):
                ratio, inner = math.exp(min(max(r, -20), 20)), abs(r) < 20
                free, is_clipped = -ratio * a, ratio > 1.2 if a > 0 else ratio < 0.8
                held = ppo_by_cases(ratio, a, 0.2, 0.2)
                if name == "clip_cov":
                    value, slope = (0.0, 0.0) if chosen[n] else (held, 0.0 if is_clipped else free * inner)
                    assert clipped[n] == (is_clipped or bool(chosen[n]))
                else:
                    sign = (r > 0) - (r < 0)
                    value = free + 0.7 * min(abs(r), 20) * bool(chosen[n])
                    slope = (free + 0.7 * sign * bool(chosen[n])) * inner
                assert values[n].item() == pytest.approx(value, rel=1e-6, abs=1e-6)
                assert gradient[n].item() == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_tokens_of_equal_covariance_are_chosen_in_order_and_a_seed_decides_for_clip_cov():
    same = torch.zeros(10, dtype=torch.float64)
    assert chosen_tokens(same, same, covariance_options("kl_cov", cov_share=0.3), 0).nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]
    values = torch.arange(-50.0, 50.0, dtype=torch.float64)
    options = covariance_options("clip_cov", cov_share=0.1, cov_range=(1.0, 900.0))
    first, again, later = (chosen_tokens(values, values, options, rollout) for rollout in (4, 4, 5))
    assert torch.equal(first, again) and not torch.equal(first, later) and first.sum() == 10


def by_cases_of_clips(log_ratio: float, advantage: float, cap: float | None = None) -> tuple[float, float]:
    """(loss, slope by the log-ratio) of a token: Schulman et al. 2017, equation 7, and with a `cap` Ye et al. 2020, equation 5.

    verl's page on PPO has the same: the larger of two losses, and for A < 0 at most -A clip_ratio_c.
    """
    ratio = math.exp(min(max(log_ratio, -20), 20))
    free, held = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28)
    value, slope = (free, free) if free >= held else (held, 0.0)
    if cap is not None and advantage < 0 and value > -advantage * cap:
        value, slope = -advantage * cap, 0.0
    return value, slope if abs(log_ratio) < 20 else 0.0


def by_paper(name: str, new: list, ratios: list, advantages: list) -> list[tuple[float, float]]:
    """(loss, slope by the token's log-prob) of each token of one response."""
    if name in ("ppo", "ppo 3"):
        return [by_cases_of_clips(r, a, 3.0 if name == "ppo 3" else None) for r, a in zip(ratios, advantages)]
    if name == "reinforce":  # Williams 1992
        return [(-a * p, -a) for p, a in zip(new, advantages)]
    if name == "cispo":  # MiniMax-M1, equations 4 and 5: the clipped weight has no gradient
        weights = [min(max(math.exp(min(max(r, -20), 20)), 0.8), 1.28) for r in ratios]
        return [(-w * a * p, -w * a) for w, a, p in zip(weights, advantages, new)]
    if name == "sapo":  # Gao et al. 2025, equations 5 to 8: the gradient's weight is 4 p (1 - p) ratio
        found = []
        for r, a in zip(ratios, advantages):
            ratio, t = math.exp(min(max(r, -20), 20)), 1.0 if a > 0 else 1.05
            gate = 1 / (1 + math.exp(min(-t * (ratio - 1), 700)))
            found.append((-4 / t * gate * a, -4 * gate * (1 - gate) * ratio * a * (abs(r) < 20)))
        return found
    mean = statistics.fmean(ratios)  # gspo, Zheng et al. 2025, equations 5 to 7, and gspo_token, 13 and 14
    own = [by_cases_of_clips(mean, a) for a in advantages]
    shared = statistics.fmean(slope for _, slope in own)
    return [(value, shared if name == "gspo" else slope) for value, slope in own]


@pytest.mark.parametrize("name", ["ppo", "ppo 3", "reinforce", "cispo", "sapo", "gspo", "gspo_token"])
def test_losses_and_gradients_of_200_random_and_extreme_responses(name):
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        length, size = (1, 3, 20)[number % 3], (0.1, 1.0, 5.0, 40.0)[number % 4]
        new, old, advantages = size * torch.randn(3, length, generator=generator, dtype=torch.float64)
        advantages[number % length] = 0.0 if number % 5 == 0 else advantages[0]
        new.requires_grad_()

        def mean(values: torch.Tensor) -> torch.Tensor:
            return values.mean().expand_as(values)

        options = losses.PolicyOptions(eps_high=0.28, dual_clip=3.0 if name == "ppo 3" else None)
        tokens = losses.PolicyTokens(new, new - old, advantages, mean)
        found, *_ = losses.POLICY_LOSSES[name.removesuffix(" 3")](tokens, options)
        [gradient] = torch.autograd.grad(found.sum(), new)
        expected = by_paper(name, new.tolist(), (new - old).tolist(), advantages.tolist())
        assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-6, abs=1e-6)
        assert gradient.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-6)


def test_every_policy_loss_is_compared_on_200_inputs():
    here = {"ppo", "reinforce", "cispo", "sapo", "gspo", "gspo_token"}
    assert here | {"dppo_tv", "dppo_kl", "clip_cov", "kl_cov"} == losses.POLICY_LOSSES.keys()


def test_value_losses_of_200_random_and_extreme_tokens():
    """OpenAI baselines, ppo2: half the larger of both squares."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    values[::3], returns[::7] = 1e4 * values[::3], 1e4 * returns[::7]
    found = losses.value_loss(values, old, returns, 0.2).tolist()
    for value, v, o, g in zip(found, values.tolist(), old.tolist(), returns.tolist()):
        assert value == pytest.approx(
            max((v - g) ** 2, (min(max(v, o - 0.2), o + 0.2) - g) ** 2) / 2, rel=1e-6, abs=1e-6
        )

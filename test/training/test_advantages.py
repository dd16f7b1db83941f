"""Compare advantages with the formulas of their papers, written here sample by sample and token by token."""

import dataclasses
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_policy import GROUP, LENGTHS, SCORES, Table, arguments, clipped, found_loss, log_probs, make_samples

from trainer.cli.train_ppo import parse
from trainer.errors import UserError
from trainer.methods import advantages as adv
from trainer.methods.ppo_state import PPOOptions
from trainer.methods.rollout_facts import group_facts, rewards_of_turns, score_notes
from trainer.runs.rl.rl_options import filtering_range

numbers = st.floats(-3, 3, allow_nan=False)
lengths_lists = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def random_rows(lengths: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return adv.to_rows(torch.randn(sum(lengths), generator=generator, dtype=torch.float64), adv.rows_mask(lengths))


def test_rows_and_flat_vectors_are_inverse():
    rows = adv.to_rows(torch.tensor([1.0, 2.0, 3.0]), adv.rows_mask([1, 2]))
    assert rows.tolist() == [[1, 0], [2, 3]]
    assert rows[adv.rows_mask([1, 2])].tolist() == [1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(lengths_lists, st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_gae_is_the_discounted_sum_of_td_errors(lengths, gamma, lambd, seed):
    """Schulman et al. 2016, equation 16: A_t = sum_l (gamma lambda)^l delta_{t+l}, written out."""
    rewards, values = random_rows(lengths, seed), random_rows(lengths, seed + 1)
    advantages, returns = adv.gae(rewards, values, adv.rows_mask(lengths), gamma, lambd)
    for i, length in enumerate(lengths):
        v = [*values[i, :length].tolist(), 0.0]
        deltas = [rewards[i, t].item() + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            expected = sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, length))
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-9)
            assert returns[i, t].item() == pytest.approx(expected + v[t], abs=1e-9)
    assert (advantages[~adv.rows_mask(lengths)] == 0).all() and (returns[~adv.rows_mask(lengths)] == 0).all()


def test_the_policy_may_have_a_lambda_of_its_own_by_the_length_of_its_responses():
    """VAPO (Yue et al. 2025, arXiv 2504.05118), equations 8 and 9, on 200 batches: returns keep the lambda of the critic."""
    generator = torch.Generator().manual_seed(1)
    for number in range(200):
        lengths = torch.randint(1, (8, 60)[number % 2], (4,), generator=generator).tolist()
        mask, alpha = adv.rows_mask(lengths), (0.05, 0.5, 1e-9)[number % 3]
        values = random_rows(lengths, number) * (1.0, 1e3)[number % 2]
        scores = torch.randn(4, generator=generator, dtype=torch.float64)
        kind = "gae", 1, 0.97, 0.9, False
        fixed = adv.AdvantageOptions(*kind, policy_lambd=0.3), [0.3] * 4
        by_length = (
            adv.AdvantageOptions(*kind, policy_lambd_alpha=alpha),
            [max(1 - 1 / (alpha * n), 0) for n in lengths],
        )
        for options, lambdas in (fixed, by_length):
            found, returns = adv.estimate_advantages(options, scores, mask, values=values)
            plain = []
            for row, (length, lambd) in enumerate(zip(lengths, lambdas)):
                own = [*values[row, :length].tolist(), 0.0]
                ends = [0.0] * (length - 1) + [scores[row].item()]
                deltas = [ends[t] + 0.97 * own[t + 1] - own[t] for t in range(length)]
                for t in range(length):
                    of_critic = sum((0.97 * 0.9) ** (k - t) * deltas[k] for k in range(t, length))
                    assert returns[row, t].item() == pytest.approx(of_critic + own[t], rel=1e-6, abs=1e-6)
                    plain.append(sum((0.97 * lambd) ** (k - t) * deltas[k] for k in range(t, length)))
            middle = statistics.fmean(plain)
            assert found[mask].tolist() == pytest.approx([value - middle for value in plain], rel=1e-6, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(lengths_lists, st.floats(0, 1), st.integers(0, 99))
def test_gae_with_lambda_1_and_no_critic_is_the_return(lengths, gamma, seed):
    rewards, mask = random_rows(lengths, seed), adv.rows_mask(lengths)
    advantages, _ = adv.gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    returns = adv.discounted_returns(rewards, mask, gamma)
    assert torch.allclose(advantages, returns)
    length = lengths[0]
    expected = sum(gamma**t * rewards[0, t].item() for t in range(length))
    assert returns[0, 0].item() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4))
def test_comparisons_within_groups(groups):
    scores = torch.tensor(groups, dtype=torch.float64).flatten()
    names = [name for name in adv.GROUP_ESTIMATORS if name != "maxrl"]  # it takes no scores below 0
    results = {name: adv.compare_in_groups(scores, name, 3).view(-1, 3) for name in names}
    for i, group in enumerate(groups):
        for j, score in enumerate(group):
            others = group[:j] + group[j + 1 :]
            assert results["rloo"][i, j].item() == pytest.approx(score - sum(others) / 2, abs=1e-9)
            assert results["dr_grpo"][i, j].item() == pytest.approx(score - sum(group) / 3, abs=1e-9)
            assert results["reinforce_baseline"][i, j].item() == results["dr_grpo"][i, j].item()
            std = statistics.stdev(group)
            expected = (score - sum(group) / 3) / (std + 1e-6)
            assert results["group_norm"][i, j].item() == pytest.approx(expected, abs=1e-6)
    assert adv.compare_in_groups(scores, "gae", 3) is scores
    assert torch.equal(adv.compare_in_groups(scores, "group_norm", 3, False), results["dr_grpo"].flatten())


def test_maxrl_is_the_mean_gradient_of_right_responses():
    """Tajwar et al. 2026 (arXiv 2602.02710): with K of N right, 1 / K for each right one, less 1 / N for every one."""
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        groups = (torch.rand(3, 5, generator=generator) < (0.0, 0.1, 0.5, 0.95)[number % 4]).double()
        found = adv.compare_in_groups(groups.flatten(), "maxrl", 5).view(3, 5)
        for row, scores in zip(found.tolist(), groups.tolist()):
            right = sum(scores)
            assert row == pytest.approx([5 * (score / right - 1 / 5) if right else 0.0 for score in scores], abs=1e-6)
    with pytest.raises(UserError, match=r"maxrl: a score of -1 .allowed: scores of 0 or more"):
        adv.compare_in_groups(torch.tensor([1.0, -1.0]), "maxrl", 2)


def test_rewards_apart_reach_the_loss_with_their_weights_and_without_lost_samples():
    """Liu et al. 2026 (arXiv 2601.05242), sample by sample: two functions, one sample that failed."""
    samples, second = make_samples(), [3.0, -1.0, 7.0, 0.0, 2.0, 2.0, 5.0, 1.0]
    for sample, score in zip(samples, second):
        sample.metrics = {"math": sample.score, "format": score}
    samples[2].failed, samples[2].score = "no answer", math.nan
    kept = [n for n in range(8) if n != 2]

    def apart(n: int, scores: list[float]) -> float:
        group = [scores[m] for m in kept if m // GROUP == n // GROUP]
        return (scores[n] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)

    sums = {n: 2 * apart(n, SCORES) + 0.5 * apart(n, second) for n in kept}
    mean, deviation = statistics.fmean(sums.values()), statistics.stdev(sums.values()) + 1e-6
    old, policy, total = Table(2, 0.0), Table(5, 0.3), 0.0
    for n in kept:
        ratio = (log_probs(policy, samples[n]) - log_probs(old, samples[n])).exp()
        total += clipped(ratio, (sums[n] - mean) / deviation, 0.2, 0.2).sum()
    line = ["--advantage_estimator", "gdpo", "--reward_func", "math,format", "--reward_weights", "2", "0.5"]
    found = found_loss(arguments(*line, "--label_key", "answer"), old, policy, samples=samples)
    assert found.item() == pytest.approx(-total.item() / sum(LENGTHS[n] for n in kept), abs=1e-9)


def test_equal_scores_of_a_group_teach_nothing():
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for name in adv.GROUP_ESTIMATORS:
        assert adv.compare_in_groups(scores, name, 2).tolist() == [0, 0, 0, 0]


def test_kl_estimators_on_average_are_the_kl():
    """k1 and k3 are unbiased: their mean under the policy is sum p log(p / q), summed here over all words."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, generator=generator, dtype=torch.float64) * 0.3
    policy, reference = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum().item()
    means = {k: (policy.exp() * adv.kl_estimate(policy, reference, k)).sum().item() for k in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(exact, rel=1e-9) and means["k3"] == pytest.approx(exact, rel=1e-9)
    assert means["k2"] == pytest.approx(exact, rel=0.3)
    assert (adv.kl_estimate(policy, reference, "k3") >= 0).all()
    p, q = policy[0].item(), reference[0].item()
    k3 = adv.kl_estimate(policy, reference, "k3")[0].item()
    assert k3 == pytest.approx(math.exp(q - p) - 1 - (q - p), rel=1e-9)


def test_the_kl_controller_moves_towards_its_target_and_never_fast():
    assert adv.adapt_kl_coef(0.1, kl=6.0, target=6.0, num_samples=64, horizon=10000) == 0.1
    assert adv.adapt_kl_coef(0.1, kl=6.6, target=6.0, num_samples=64, horizon=640) == pytest.approx(0.101)
    assert adv.adapt_kl_coef(0.1, kl=600, target=6.0, num_samples=64, horizon=640) == pytest.approx(0.1 * 1.02)
    assert adv.adapt_kl_coef(0.1, kl=0.0, target=6.0, num_samples=64, horizon=640) == pytest.approx(0.1 * 0.98)


def test_the_overlong_penalty_is_a_ramp():
    lengths = torch.tensor([50, 80, 85, 90, 100])
    assert adv.overlong_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0, 0, -0.125, -0.25, -0.5])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=6), min_size=1, max_size=5))
def test_running_moments_are_those_of_everything_seen(batches):
    moments = adv.RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch))
    everything = [value for batch in batches for value in batch]
    assert moments.mean == pytest.approx(statistics.fmean(everything), abs=1e-5)
    std = statistics.pstdev(everything)
    expected = (everything[0] - statistics.fmean(everything)) / max(std, 1e-6)
    if std > 1e-2:
        assert moments.normalize(torch.tensor(everything[:1]))[0].item() == pytest.approx(expected, abs=1e-3)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens_alone():
    lengths = [1, 4, 2]
    mask, rows = adv.rows_mask(lengths), random_rows(lengths, 3)
    white = adv.whiten(rows, mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert white[mask].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert (white[~mask] == 0).all()
    assert torch.allclose(adv.whiten(rows, mask, False)[mask], rows[mask] - rows[mask].mean())


def test_dynamic_filtering_keeps_groups_that_can_teach():
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert adv.groups_in_range(scores, 2, 0.0, 1.0).tolist() == [False, True, False]
    equal = torch.tensor([0.5, 0.5, 0.4, 0.6])  # inside the bounds, but equal scores have the advantage 0
    assert adv.groups_in_range(equal, 2, 0.0, 1.0).tolist() == [False, True]


@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 2.5)])
@pytest.mark.parametrize("bounds", [None, (0.3, 0.8)])
def test_dynamic_filtering_knows_right_groups_of_any_scores(wrong, right, bounds):
    """4 responses, k of them right. Without bounds, 0 < k < 4 stays (DAPO, equation 11), else the share k / 4 decides."""
    flags = f"--pretrain m --dataset d --preset dapo --n_samples_per_prompt 4 --reward_range {wrong} {right}".split()
    flags += ["--dynamic_filtering_range", *map(str, bounds)] if bounds else []
    args, _ = parse(flags)
    scores = torch.tensor([right if place < k else wrong for k in range(5) for place in range(4)], dtype=torch.float64)
    low, high = bounds or (0, 1)
    wanted = [low < k / 4 < high for k in range(5)]
    assert adv.groups_in_range(scores, 4, *filtering_range(args)).tolist() == wanted


def test_notes_and_shares_of_groups():
    def told(scores, size, filtering=None, curriculum="none", evaluates=False, reward_range=None, nll=0.0):
        options = PPOOptions(adv.AdvantageOptions("group_norm", size), None, None, 0)
        options = dataclasses.replace(options, filtering_range=filtering, reward_range=reward_range)
        options = dataclasses.replace(options, positive_nll_coef=nll)
        samples = [SimpleNamespace(score=score, failed="") for score in scores]
        return score_notes(samples, options, curriculum, evaluates), group_facts(samples, options)

    notes, facts = told([-1, 1, 1, 1, -1, -1, 1, 1], 2, filtering=(0.1, 0.9), curriculum="learnable")
    assert notes == {"range": "warning: 3 of 8 scores are not from 0 to 1, which --dynamic_filtering_range, --curriculum "
                     "learnable take for wrong and right: give --reward_range WRONG RIGHT"}  # fmt: skip
    assert facts == {"groups_all_right": 0.5, "groups_all_wrong": 0.25, "groups_equal": 0.75}
    for quiet in ({}, {"filtering": (-math.inf, math.inf)}, {"evaluates": True}):
        assert told([-1, 1], 2, **quiet)[0] == {}, "equal scores and pass@1 need no range here"
    assert told([-1, 1], 2, filtering=(-0.5, 0.5), reward_range=(-1, 1))[0] == {}
    assert "which --positive_nll_coef take" in told([-1, 1], 2, nll=0.1)[0]["range"]
    assert "eval_pass_at_1, groups_all_right take" in told([0, 1.5], 2, evaluates=True)[0]["range"]
    assert "which groups_all_right take" in told([1, 10], 2)[0]["range"]
    graded = (
        "warning: the best of 2 scores is 0.5, but eval_pass_at_1 take 1 for right: give --reward_range WRONG RIGHT"
    )
    assert told([0, 0.5], 2, evaluates=True)[0] == {"range": graded} and told([0, 0.5], 2)[0] == {}
    assert (
        "eval_pass_at_1" in told([-1, 0], 2, evaluates=True)[0]["range"] and told([-1, 1], 2, evaluates=True)[0] == {}
    )
    assert told([0, 0.5], 2, evaluates=True, reward_range=(0, 0.5))[0] == {}
    assert told([0.0, 2.5], 1, reward_range=(0.0, 2.5)) == ({}, {"groups_all_right": 0.5, "groups_all_wrong": 0.5})
    equal, facts = told([0.0, 0.0, 0.5, 0.5], 2)
    assert list(equal) == ["equal"] and "all responses to each prompt have the same score" in equal["equal"]
    assert facts == {"groups_all_right": 0.0, "groups_all_wrong": 0.5, "groups_equal": 1.0}
    assert list(told([0.2, 0.2], 1)[0]) == ["equal"] and told([0.2], 1)[0] == {}


def test_reinforce_sums_the_penalty_and_the_score_behind_each_token():
    mask = adv.rows_mask([2, 3])
    penalty = torch.tensor([[0.1, 0.2, 9.0], [0.3, 0.4, 0.5]], dtype=torch.float64)
    scores = torch.tensor([1.0, -1.0], dtype=torch.float64)
    rewards = adv.token_rewards(scores, mask, penalty)
    assert torch.allclose(rewards, torch.tensor([[-0.1, 0.8, 0], [-0.3, -0.4, -1.5]], dtype=torch.float64))
    options = adv.AdvantageOptions("group_norm", group_size=2, gamma=0.5)
    advantages, _ = adv.estimate_advantages(options, scores, mask, penalty)
    shaped = 1 / (math.sqrt(2) + 1e-6)
    assert advantages[0].tolist() == pytest.approx([-0.1 + 0.5 * (shaped - 0.2), shaped - 0.2, 0])


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_these_are_whitened_over_the_rollout(estimator):
    lengths = [2, 3, 1, 4]
    mask, scores = adv.rows_mask(lengths), torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    options = adv.AdvantageOptions(estimator, group_size=2, lambd=0.9)
    advantages, returns = adv.estimate_advantages(options, scores, mask, values=random_rows(lengths, 0))
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert advantages[mask].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert not torch.equal(returns, advantages)


def plain_weights(ratios: list[float], level: str, cap: float, masked: bool) -> list[float]:
    """Of the tokens of a response, by products and roots instead of logarithms."""
    product = math.prod(ratios)
    used = {
        "token": ratios,
        "sequence": [product] * len(ratios),
        "geometric": [product ** (1 / len(ratios))] * len(ratios),
    }
    return [(w if 1 / cap <= w <= cap else 0.0) if masked else min(w, cap) for w in used[level]]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_are_the_ratios_of_tokens_or_responses(level, masked):
    responses = [[2.0, 0.125], [1.5, 1.4, 1.0], [0.9], [3.0, 2.5]]
    lengths = [len(ratios) for ratios in responses]
    log_ratio = torch.tensor([r for ratios in responses for r in ratios], dtype=torch.float64).log()
    mask = adv.rows_mask(lengths)
    rows = adv.to_rows(log_ratio, mask)
    kept = adv.within_ratios(rows, mask, level, (1 / 2.2, 2.2)) if masked else mask
    weights = (adv.importance_weights(rows, mask, level, 2.2) * kept)[mask]
    expected = [w for ratios in responses for w in plain_weights(ratios, level, 2.2, masked)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert (0 in expected) == masked and len(set(expected)) > 2


def test_a_ratio_beyond_range_gets_the_cap_or_nothing():
    log_ratio, mask = torch.tensor([[800.0, 800.0]], dtype=torch.float64), adv.rows_mask([2])
    for level in ("token", "sequence", "geometric"):
        assert adv.importance_weights(log_ratio, mask, level, 2.0).tolist() == [[2, 2]]
        assert not adv.within_ratios(log_ratio, mask, level, (0.5, 2.0)).any()


def test_advantages_of_a_teacher_are_the_gradient_of_the_reverse_kl():
    """Averaged over all tokens of the vocabulary, -A grad log pi is the gradient of KL(policy || teacher)."""
    policy, teacher = torch.randn(2, 1, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    policy.requires_grad_()
    log_p, log_t = policy.log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), policy, retain_graph=True)
    mask = torch.ones(7, 1, dtype=torch.bool)  # seven responses of one token: each word once
    penalty = adv.kl_estimate(log_p.detach(), log_t, "k1")[:, None]
    options = adv.AdvantageOptions("distill", has_teacher=True)
    advantages, _ = adv.estimate_advantages(options, torch.full((7,), 9.0, dtype=torch.float64), mask, penalty)
    (found,) = torch.autograd.grad(-(log_p.detach().exp() * advantages[:, 0] * log_p).sum(), policy)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("estimator", ["distill", "gae", "reinforce", *adv.GROUP_ESTIMATORS])
def test_scores_and_a_teacher_on_200_random_and_extreme_rollouts(estimator):
    """A - coef * (log policy - log teacher) of each token, as in slime (docs/en/advanced/on-policy-distillation.md) and in
    tinker-cookbook (distillation/train_on_policy.py). The critic learns the returns of scores alone."""
    for number in range(200):
        generator = torch.Generator().manual_seed(number)
        mask = adv.rows_mask(torch.randint(1, 6, (4,), generator=generator).tolist(), 5)
        scores = torch.rand(4, generator=generator, dtype=torch.float64).round(decimals=number % 3)
        old, teacher, values = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) * 10.0 ** (number % 5 - 2)
        kind, coef = {"group_size": 2, "divide_by_std": number % 2 == 0}, number / 100
        args = scores, mask, coef * adv.kl_estimate(old, teacher, "k1"), values
        found, returns = adv.estimate_advantages(adv.AdvantageOptions(estimator, **kind, has_teacher=True), *args)
        base = torch.zeros_like(old)
        if estimator != "distill":
            base, of_scores = adv.estimate_advantages(
                adv.AdvantageOptions(estimator, **kind), scores, mask, None, values
            )
            assert returns.equal(of_scores)
        for row, length in enumerate(mask.sum(1).tolist()):
            own = [
                base[row, t].item() + coef * (teacher[row, t].item() - old[row, t].item()) if t < length else 0.0
                for t in range(5)
            ]
            assert found[row].tolist() == pytest.approx(own, rel=1e-6, abs=1e-6)


def test_turns_have_rewards_of_their_own():
    """On 200 batches of episodes: rewards at the ends of turns, then equation 16 of Schulman et al. 2016 and Williams 1992."""
    generator = torch.Generator().manual_seed(3)
    for number in range(200):
        turns = [torch.randint(1, 5, (n,), generator=generator).tolist() for n in (1, 3, 2)]
        mask, scale = adv.rows_mask([sum(lengths) for lengths in turns]), (1.0, 1e3, 0.0)[number % 3]
        own = [
            (scale * torch.randn(len(lengths), generator=generator, dtype=torch.float64)).tolist() for lengths in turns
        ]
        spans = [[[sum(n[:k]), sum(n[: k + 1])] for k in range(len(n))] for n in turns]
        samples = [SimpleNamespace(turns=s, turn_rewards=r) for s, r in zip(spans, own)]
        part = SimpleNamespace(samples=samples, width=mask.shape[1])
        values = adv.to_rows(torch.randn(int(mask.sum()), generator=generator, dtype=torch.float64), mask)
        found = {}
        for kind in (adv.AdvantageOptions("gae", 1, 0.9, 0.8), adv.AdvantageOptions("reinforce", 1, 0.9)):
            scores = torch.tensor([sum(rewards) for rewards in own], dtype=torch.float64)
            _, found[kind.estimator] = adv.estimate_advantages(
                kind, scores, mask, values=values, of_turns=rewards_of_turns(part)
            )
        for row, (lengths, rewards) in enumerate(zip(turns, own)):
            at = [r for n, reward in zip(lengths, rewards) for r in [0.0] * (n - 1) + [reward]]
            v = [*values[row, : len(at)].tolist(), 0.0]
            deltas = [at[t] + 0.9 * v[t + 1] - v[t] for t in range(len(at))]
            for t in range(len(at)):
                expected = sum((0.9 * 0.8) ** (k - t) * deltas[k] for k in range(t, len(at))) + v[t]
                assert found["gae"][row, t].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
                expected = sum(0.9 ** (k - t) * at[k] for k in range(t, len(at)))
                assert found["reinforce"][row, t].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def scores_of_rollout(number: int) -> torch.Tensor:
    """(20,) scores of four prompts: 0 and 1, -1 and 1, random and large ones, equal groups, and failed samples."""
    generator = torch.Generator().manual_seed(number)
    random = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    kind = number % 5
    scores = ((random > 0).double(), random.sign(), random, 1e4 * random, 1e-3 * random)[kind]
    scores[number % 4] = (0.0, 1.0, -1.0)[number % 3]
    if number % 7 == 0:
        scores[0, : number % 5] = math.nan
    return scores.flatten()


def compared(group: list[float], estimator: str) -> list[float]:
    """What a paper says of the scores of one prompt, one response at a time. One that is left alone has 0."""
    found = []
    for number, score in enumerate(group):
        others, mean = group[:number] + group[number + 1 :], statistics.fmean(group)
        if estimator == "rloo":  # Ahmadian et al. 2024, equation 5
            found.append(score - statistics.fmean(others) if others else 0.0)
        elif estimator == "group_norm":  # Shao et al. 2024, section 4.1.2, with verl's epsilon
            found.append((score - mean) / ((statistics.stdev(group) if others else 0.0) + 1e-6))
        else:  # Dr. GRPO, equation 3; REINFORCE++-baseline
            found.append(score - mean)
    return found


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline", "batch_std", "scalerl"])
def test_groups_of_200_random_and_extreme_rollouts(estimator):
    for number in range(200):
        scores = scores_of_rollout(number)
        own = [[score for score in group if not math.isnan(score)] for group in scores.view(4, 5).tolist()]
        if estimator in ("batch_std", "scalerl"):  # Liu et al. 2025; ScaleRL, section 4: one deviation for the rollout
            used = own if estimator == "batch_std" else [group if len({*group}) > 1 else [] for group in own]
            parts = [compared(group, "dr_grpo") if group in used else [0.0] * len(group) for group in own]
            all_of = [x for group in used for x in (group if estimator == "batch_std" else compared(group, "dr_grpo"))]
            deviation = statistics.stdev(all_of) + 1e-6
            parts = [[value / deviation for value in part] for part in parts]
        else:
            parts = [compared(group, estimator) for group in own]
        name, is_batch = ("group_norm", True) if estimator == "batch_std" else (estimator, False)
        found = adv.compare_in_groups(scores, name, 5, batch_std=is_batch)
        assert (found[scores.isnan()] == 0).all()
        expected = [value for part in parts for value in part]
        assert found[~scores.isnan()].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_rewards_apart_of_200_random_and_extreme_rollouts():
    """GDPO (arXiv 2601.05242): each reward normalised in its group, then their weighted sum over the rollout."""
    for number in range(200):
        rewards = [scores_of_rollout(5 * number + kind).nan_to_num() for kind in (number % 5, (number + 2) % 5)]
        weights = (1.0, 0.25)
        sums = [0.0] * 20
        for reward, weight in zip(rewards, weights):
            normed = [value for group in reward.view(4, 5).tolist() for value in compared(group, "group_norm")]
            sums = [total + weight * value for total, value in zip(sums, normed)]
        mean, deviation = statistics.fmean(sums), statistics.stdev(sums) + 1e-6
        found = adv.normalized_apart(torch.stack(rewards, 1), torch.tensor(weights, dtype=torch.float64), 5)
        assert found.tolist() == pytest.approx([(value - mean) / deviation for value in sums], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_tokens_of_200_random_and_extreme_rollouts(estimator):
    """GAE (Schulman et al. 2016, equation 16) and returns, with a KL in the rewards, normalised over all tokens."""
    for number in range(200):
        generator, gamma, lambd = (
            torch.Generator().manual_seed(number),
            (1.0, 0.9)[number % 2],
            (1.0, 0.95, 0.0)[number % 3],
        )
        lengths = torch.randint(1, (3, 30)[number % 2], (4,), generator=generator).tolist()
        mask, scores = adv.rows_mask(lengths), scores_of_rollout(5 * number + number % 4)[1:5].nan_to_num()
        penalty, values = 0.1 * random_rows(lengths, number), random_rows(lengths, number + 1) * (1.0, 1e3)[number % 2]
        options = adv.AdvantageOptions(estimator, 2, gamma, lambd)
        found, _ = adv.estimate_advantages(options, scores, mask, penalty, values)
        plain = []
        own = scores.tolist()
        if estimator == "reinforce_baseline":
            own = [value for first in (0, 2) for value in compared(own[first : first + 2], estimator)]
        for row, length in enumerate(lengths):
            rewards = [-penalty[row, t].item() + own[row] * (t == length - 1) for t in range(length)]
            v = [*values[row, :length].tolist(), 0.0] if estimator == "gae" else [0.0] * (length + 1)
            decay = gamma * (lambd if estimator == "gae" else 1.0)
            deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(length)]
            plain += [sum(decay ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
        middle, deviation = statistics.fmean(plain), math.sqrt(statistics.pvariance(plain) + 1e-8)
        assert found[mask].tolist() == pytest.approx([(x - middle) / deviation for x in plain], rel=1e-6, abs=1e-6)

"""--tis_*, --rollout_kl_max and other masks: whose loss counts how much, and in which mean, against one response at a time in Python."""

import math
import random
import statistics

import pytest
import torch
from plain_policy import (
    LENGTHS,
    MAX_LEN,
    SCORES,
    Table,
    arguments,
    clipped,
    found_loss,
    found_metrics,
    group_of,
    log_probs,
    make_samples,
)
from trl import GRPOTrainer

from trainer.errors import UserError
from trainer.methods import advantages as adv
from trainer.runs.rl.rl_checks import validate


def of_level(level: str, log_ratios: list[float]) -> list[float]:
    """The ratio of each token, at most e^700, which a float holds."""
    total = sum(log_ratios)
    used = {"token": log_ratios, "sequence": [total] * len(log_ratios)}
    used["geometric"] = [total / len(log_ratios)] * len(log_ratios)
    return [math.exp(min(value, 700.0)) for value in used[level]]


def test_weights_masks_and_means_of_200_random_and_extreme_responses():
    generator = random.Random(0)
    for number in range(200):
        size = (0.1, 2.0, 300.0)[number % 3]
        rows = [[generator.gauss(0, size) for _ in range(generator.randint(1, 9))] for _ in range(3)]
        mask = adv.rows_mask([len(row) for row in rows])
        log_ratio = adv.to_rows(torch.tensor([x for row in rows for x in row], dtype=torch.float64), mask)
        level, (floor, cap) = ("token", "sequence", "geometric")[number // 3 % 3], (generator.random(), 1.5)
        weights = adv.importance_weights(log_ratio, mask, level, cap, floor)
        kept = adv.within_ratios(log_ratio, mask, level, (floor, 2.5))
        shares = adv.weights_of_kept(kept, mask, "sequence")
        for place, row in enumerate(rows):
            ratios = of_level(level, row)
            inside = [floor <= ratio <= 2.5 for ratio in ratios]
            found = [values[place, : len(row)].tolist() for values in (weights, kept, shares)]
            assert found[0] == pytest.approx([min(max(ratio, floor), cap) for ratio in ratios], abs=1e-6)
            assert found[1] == inside
            assert found[2] == pytest.approx([len(row) / sum(inside) if keep else 0.0 for keep in inside], abs=1e-6)


def sampled(seed: int, old: Table) -> list:
    """Samples of an engine whose log-probs differ from those of training. One response is far off in every token."""
    generator, samples = random.Random(seed), make_samples()
    for number, sample in enumerate(samples):
        size = 3.0 if number == 3 else 0.4
        sample.log_probs = [p + generator.gauss(0, size) for p in log_probs(old, sample).tolist()]
    return samples


CASES = {  # flags: (weight of a token's ratio, level, range, level of the mask)
    "--tis_cap 1.2 --tis_floor 0.9": ("token", 0.9, 1.2, None),
    "--tis_cap 1.5 --tis_mask": ("token", 0, 1.5, ("token", 1 / 1.5, 1.5)),  # IcePop with one bound
    "--tis_cap 1e9 --tis_mask --tis_mask_range 0.8 1.4": ("token", 0, 1e9, ("token", 0.8, 1.4)),  # IcePop
    "--tis_cap 1.3 --tis_mask --tis_mask_range 0.9 1.1 --tis_mask_level geometric": (
        "token", 0, 1.3, ("geometric", 0.9, 1.1)
    ),  # seq-mask-tis
    "--tis_cap 2 --tis_level sequence --tis_mask --tis_mask_range 0 1.6": ("sequence", 0, 2.0, ("sequence", 0, 1.6)),
    "--rollout_kl_max 0.1 --rollout_kl_estimator k2": None,
}  # fmt: skip


@pytest.mark.parametrize("loss_agg", ["token", "sequence", "fixed_length", "sum"])
@pytest.mark.parametrize("rejected", ["count", "leave"])
@pytest.mark.parametrize("flags", CASES)
def test_rejected_tokens_count_in_the_mean_or_leave_it(flags, rejected, loss_agg):
    old, policy = Table(2, 0.0), Table(5, 0.3)
    samples, total, count, num_rejected = sampled(1, old), 0.0, 0, 0
    for n, sample in enumerate(samples):
        ratio = (log_probs(policy, sample) - log_probs(old, sample)).exp()
        gains = clipped(ratio, SCORES[n] - statistics.fmean(group_of(n)), 0.2, 0.2)
        logs = (log_probs(old, sample) - torch.tensor(sample.log_probs)).tolist()
        weights, inside = [1.0] * len(logs), [sum(x**2 / 2 for x in logs) / len(logs) <= 0.1] * len(logs)
        if CASES[flags]:
            level, floor, cap, masked = CASES[flags]
            weights = [min(max(r, floor), cap) for r in of_level(level, logs)]
            inside = [not masked or masked[1] <= r <= masked[2] for r in of_level(masked[0] if masked else level, logs)]
        num_rejected += inside.count(False)
        terms = sum(w * g for w, g, keep in zip(weights, gains, inside) if keep)
        counted = sum(inside) if rejected == "leave" else LENGTHS[n]
        divisor = {"token": 1, "sum": 1, "sequence": max(counted, 1), "fixed_length": MAX_LEN}[loss_agg]
        total, count = total + terms / divisor, count + (counted if loss_agg == "token" else int(counted > 0))
    assert (num_rejected > 0) == ("--tis_floor" not in flags)
    line = ["--preset", "dr_grpo", "--loss_agg", loss_agg, *flags.split()]
    line += ["--rejected_tokens", rejected] if num_rejected else []
    found = found_loss(arguments(*line), old, policy, samples=samples)
    assert found.item() == pytest.approx(-total.item() / count, abs=1e-6)


def test_if_all_tokens_are_rejected_the_loss_is_0():
    old = Table(2, 0.0)
    flags = ["--preset", "dr_grpo", "--rollout_kl_max", "1e-9", "--rejected_tokens", "count"]
    assert found_loss(arguments(*flags), old, Table(5, 0.3), samples=sampled(1, old)).item() == 0


def plain_loss(kept, old: Table, policy: Table, samples: list, loss_agg: str) -> float:
    """The mean of the losses of --preset dr_grpo if `kept(n, advantage)` lists which tokens have one. All count in the mean."""
    total = 0.0
    for n, sample in enumerate(samples):
        ratio, advantage = (
            (log_probs(policy, sample) - log_probs(old, sample)).exp(),
            SCORES[n] - statistics.fmean(group_of(n)),
        )
        terms = clipped(ratio, advantage, 0.2, 0.2) * torch.tensor(kept(n, advantage))
        total += terms.sum() / {"token": 1, "sum": 1, "sequence": LENGTHS[n], "fixed_length": MAX_LEN}[loss_agg]
    return -total.item() / (sum(LENGTHS) if loss_agg == "token" else len(LENGTHS))


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
def test_negative_responses_that_have_drifted_have_no_loss(loss_agg):
    """--off_policy_mask_threshold, against a response at a time and against TRL's own function."""
    old, policy = Table(2, 0.0), Table(5, 0.3)
    samples, bound, masked = sampled(1, old), 0.05, {}

    def kept(n: int, advantage: float) -> list[bool]:
        drift = torch.tensor(samples[n].log_probs) - log_probs(policy, samples[n]).detach()
        masked[n] = advantage < 0 and drift.mean().item() > bound
        ours = [not masked[n]] * LENGTHS[n]
        values = torch.tensor([[advantage]]), -drift[None], torch.zeros(1, LENGTHS[n]), torch.ones(1, LENGTHS[n])
        assert GRPOTrainer.get_off_policy_mask(*values, bound).bool().expand(1, LENGTHS[n])[0].tolist() == ours
        return ours

    expected = plain_loss(kept, old, policy, samples, loss_agg)
    negative = [n for n in range(8) if SCORES[n] < statistics.fmean(group_of(n))]
    assert 0 < sum(masked.values()) < len(negative)
    args = arguments("--preset", "dr_grpo", "--loss_agg", loss_agg, "--off_policy_mask_threshold", str(bound))
    assert found_loss(args, old, policy, samples=samples).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss_agg", ["token", "sequence"])
def test_only_the_tokens_of_largest_entropy_have_a_loss(loss_agg):
    """--top_entropy_quantile 0.3, with the entropies of the policy before the update."""
    old, policy = Table(2, 0.0), Table(5, 0.3)
    entropies = []
    for sample in make_samples():
        before = [sample.prompt_ids[-1], *sample.response_ids[:-1]]
        logs = old.table.log_softmax(-1)[before].double()
        entropies.append([-sum(math.exp(p) * p for p in row) for row in logs.tolist()])
    ranked = sorted(x for row in entropies for x in row)
    place = 0.7 * (len(ranked) - 1)
    bound = ranked[int(place)] + (place - int(place)) * (ranked[int(place) + 1] - ranked[int(place)])
    expected = plain_loss(lambda n, _: [x >= bound for x in entropies[n]], old, policy, make_samples(), loss_agg)
    args = arguments("--preset", "dr_grpo", "--loss_agg", loss_agg, "--top_entropy_quantile", "0.3")
    assert found_loss(args, old, policy).item() == pytest.approx(expected, abs=1e-6)


def test_the_shares_of_tokens_that_each_side_clips():
    """A ratio below 1 - 0.2 with a negative advantage, above 1 + 0.1 with a positive one: as TRL counts them."""
    old, policy, samples, wanted = Table(2, 0.0), Table(5, 0.3), make_samples(), [0, 0]
    for n, sample in enumerate(samples):
        advantage = SCORES[n] - statistics.fmean(group_of(n))
        for ratio in (log_probs(policy, sample) - log_probs(old, sample)).exp().tolist():
            wanted[0] += advantage < 0 and ratio < 0.8
            wanted[1] += advantage > 0 and ratio > 1.1
    found = found_metrics(arguments("--preset", "dr_grpo", "--eps_clip", "0.2", "--eps_clip_high", "0.1"), old, policy)
    assert [found["clip_fraction_low"], found["clip_fraction_high"]] == pytest.approx(
        [w / sum(LENGTHS) for w in wanted]
    )
    assert min(wanted) > 0 and found["clip_fraction"] == pytest.approx(sum(wanted) / sum(LENGTHS))


def test_bounds_that_are_no_interval_are_refused():
    flags = ["--preset", "dr_grpo", "--tis_cap", "2", "--tis_mask", "--tis_mask_range", "2", "1"]
    with pytest.raises(UserError, match="--tis_mask_range: 2 1"):
        validate(arguments(*flags))

"""--tis_* and --rollout_kl_max: whose loss counts how much, and in which mean, against one response at a time in Python."""

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
    group_of,
    log_probs,
    make_samples,
)

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


def test_bounds_that_are_no_interval_are_refused():
    flags = ["--preset", "dr_grpo", "--tis_cap", "2", "--tis_mask", "--tis_mask_range", "2", "1"]
    with pytest.raises(UserError, match="--tis_mask_range: 2 1"):
        validate(arguments(*flags))

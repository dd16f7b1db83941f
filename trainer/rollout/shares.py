"""Shares of right answers: pass@k, and confidence intervals of means over prompts. It imports no torch."""

import math
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
QUANTILE = 1.959963984540054  # of the normal distribution, for an interval of 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Mean:
    """A mean over prompts with the ends of its 95 % interval, and how that was found."""

    mean: float
    low: float
    high: float
    interval: str


def pass_at(k: int, num_answers: int, num_right: int) -> float:
    """The unbiased estimate of pass@k: the chance that a right answer is among k of n answers, of which c are right.

    It is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, Evaluating large language models trained on code, equation 1).
    """
    total = math.comb(num_answers, k)
    return (total - math.comb(num_answers - num_right, k)) / total


def sizes_of_pass(num_answers: int) -> list[int]:
    """Each k of pass@k that is given: 1, 2, 4 and so on, and the number of answers."""
    powers = [1 << n for n in range(num_answers.bit_length())]
    return powers if powers[-1] == num_answers else [*powers, num_answers]


def mean_and_interval(values: list[float]) -> Mean:
    """The mean of one value for each prompt: with Wilson's interval if all are 0 or 1, else with the bootstrap's."""
    mean = math.fsum(values) / len(values)
    if all(value in (0, 1) for value in values):
        return Mean(mean, *wilson(mean, len(values)), "wilson")
    return Mean(mean, *bootstrap(values), "bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """The score interval of a share of `count` trials (Wilson 1927, Probable inference, JASA 22; without correction)."""
    z2 = QUANTILE**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = QUANTILE * math.sqrt(share * (1 - share) / count + z2 / (4 * count)) / (1 + z2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The percentile interval of the mean of `values`, from resamples of prompts (Efron 1979, Annals of Statistics 7).

    The resamples have a fixed seed, so the same values give the same interval.
    """
    drawn, found = np.random.default_rng(0), np.asarray(values)
    means = [found[drawn.integers(len(found), size=len(found))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)

"""Shares of right answers: pass@k. It imports no torch."""

import math


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

"""Sums that do not depend on their order: addends are rounded to a grid, and sums of whole multiples of it are exact."""

import math

import torch

GRADIENT_GRID = 2.0**-48  # of a mean gradient; below it, Adam's eps of 1e-8 hides any difference
GRADIENT_LIMIT = 2.0**15  # 63 bits hold sums up to here
LOSS_GRID = 2.0**-30  # of a sum of losses; fp64 holds sums up to 2^23


def to_grid(values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return `values` * `scale` in whole multiples of GRADIENT_GRID, int64. `scale` is a power of two."""
    return values.double().mul_(scale / GRADIENT_GRID).round_().to(torch.int64)


def from_grid(sums: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return fp32 sums / `divisor`, from whole multiples of GRADIENT_GRID."""
    return sums.double().mul_(GRADIENT_GRID).div_(divisor).float()


def power_of_two_above(value: float) -> float:
    """Return the smallest power of two that is larger than `value`, which is positive: 3 gives 4, 4 gives 8."""
    return 2.0 ** math.frexp(value)[1]


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of fp32 `values`, in any order the same.

    A square of fp32 is exact in fp64. Each one is rounded to a grid so coarse that 62 bits hold the sum.
    """
    if not values.numel():
        return 0.0
    squares = values.double().square_()
    largest = squares.max().item()
    if not 0.0 < largest < math.inf:  # all are zero, or one is not finite
        return largest
    grid = power_of_two_above(largest) * power_of_two_above(values.numel()) * 2.0**-62
    return squares.div_(grid).round_().to(torch.int64).sum().item() * grid


def on_loss_grid(value: torch.Tensor) -> torch.Tensor:
    """Return `value` in fp64, rounded to LOSS_GRID. Its gradient is that of `value`."""
    exact = value.double()
    with torch.no_grad():
        rounding = exact.div(LOSS_GRID).round_().mul_(LOSS_GRID).sub_(exact)
    return exact + rounding

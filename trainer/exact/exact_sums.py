"""Sums that do not depend on their order: addends are rounded to a grid, and sums of whole multiples of it are exact."""

import math
from collections.abc import Callable

import torch

from trainer.metrics import MetricSum

GRADIENT_GRID = 2.0**-48  # of a mean gradient; below it, Adam's eps of 1e-8 hides any difference
GRADIENT_LIMIT = 2.0**15  # 63 bits hold sums up to here
PIECE = 1 << 15  # elements that are added at a time
LOSS_GRID = 2.0**-30  # of the loss of a sample, which fp64 holds up to 2^23; `forward_backward` adds up samples


def to_grid(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 `values` in whole multiples of GRADIENT_GRID, int64. The product with a power of two is exact."""
    return values.mul(1 / GRADIENT_GRID).round_().to(torch.int64)


def add_to(sums: torch.Tensor, values: torch.Tensor) -> float:
    """Add fp32 `values` on the grid to `sums`, int64. Returns the largest absolute value, infinite if one is not finite.

    It works in pieces that stay in the processor's cache: a large tensor takes a quarter of the time.
    """
    if not values.numel():
        return 0.0
    bounds = []
    for total, piece in zip(sums.view(-1).split(PIECE), values.reshape(-1).split(PIECE)):
        bounds += torch.aminmax(piece)
        total += to_grid(piece)
    largest = torch.stack(bounds).abs().max().item()
    return largest if math.isfinite(largest) else math.inf


def from_grid(sums: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return fp32 sums / `divisor`, from whole multiples of GRADIENT_GRID."""
    return sums.double().mul_(GRADIENT_GRID).div_(divisor).float()


def power_of_two_above(value: float) -> float:
    """Return the smallest power of two that is larger than `value`, which is positive: 3 gives 4, 4 gives 8."""
    return 2.0 ** math.frexp(value)[1]


def grid_of_squares(largest: float, size: int) -> float:
    """Return the grid for the squares of `size` values up to `largest`: so coarse that 62 bits hold their sum."""
    return power_of_two_above(largest * largest or 1.0) * power_of_two_above(size) * 2.0**-62


def sum_of_squares(values: torch.Tensor, grid: float) -> torch.Tensor:
    """Return the sum of the squares of fp32 `values`, int64, in whole multiples of `grid`: in any order the same.

    A square of fp32 is exact in fp64. Each one is rounded once.
    """
    return values.double().square_().div_(grid).round_().to(torch.int64).sum()


def on_loss_grid(value: torch.Tensor) -> torch.Tensor:
    """Return `value` in fp64, rounded to LOSS_GRID. Its gradient is that of `value`."""
    exact = value.double()
    with torch.no_grad():
        rounding = exact.div(LOSS_GRID).round_().mul_(LOSS_GRID).sub_(exact)
    return exact + rounding


def with_exact_sums(loss_fn: Callable) -> Callable:
    """Return `loss_fn` with its sum and its metrics rounded to a grid, in fp64. So they add up exactly in any order.

    Values of tokens are rounded too: ranks that split a sample add up to the same sum as one rank. Losses do it with the
    function `rounded` of the micro-batch.
    """

    def loss(model, micro_batch: dict) -> tuple:
        micro_batch["rounded"] = on_loss_grid
        total, count, *metrics = loss_fn(model, micro_batch)
        return on_loss_grid(total), count, *({name: _rounded(value) for name, value in m.items()} for m in metrics)

    return loss


def _rounded(value):
    if isinstance(value, MetricSum):
        return value.with_parts([on_loss_grid(part.detach()) for part in value.parts()])
    return on_loss_grid(value.detach())

"""Losses whose sums over samples are exact."""

from collections.abc import Callable

from trainer.exact.exact_sums import on_loss_grid
from trainer.metrics import MetricSum


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

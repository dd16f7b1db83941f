"""Sums over the tokens of whole sequences. A mesh may have split these sequences over sp."""

from typing import Optional

import torch
import torch.distributed as dist


class _SumOverGroup(torch.autograd.Function):
    """Sum over `group`. Every rank gets the result. Backward sums too, because each rank's loss may use the result."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_by_sequence(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, sp_group: Optional[dist.ProcessGroup]
) -> torch.Tensor:
    """Sum `values` (rows, tokens, ...) by `sequence_ids` (rows, tokens) to (num_sequences, ...), all-reduced over sp.

    Sums are fp64, because a preference looks at small differences of large sums. Every sp rank gets every sum. The loss
    of these sums counts on only one sp rank, see `counts_here`. Values [1, 2, 4] of sequences [0, 1, 0] give [5, 2].
    """
    # a micro-batch without a sequence still has a token with id 0; its sum is cut off
    sums = torch.zeros(max(num_sequences, 1), *values.shape[2:], dtype=torch.float64, device=values.device)
    sums = sums.index_add(0, sequence_ids.flatten(), values.flatten(0, 1).double())
    if sp_group is not None and sp_group.size() > 1:
        sums = _SumOverGroup.apply(sums, sp_group)
    return sums[:num_sequences]


def counts_here(sp_group: Optional[dist.ProcessGroup]) -> int:
    """Return 1 on the one sp rank whose loss, count and metrics of whole sequences are used, and 0 on the others."""
    return int(sp_group is None or sp_group.rank() == 0)

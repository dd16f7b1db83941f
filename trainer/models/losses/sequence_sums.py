"""Sums over the tokens of whole sequences, which may be split over sp."""

from typing import Optional

import torch
import torch.distributed as dist

from trainer.distributed.gradient_collectives import Sum, SumGradients


def sum_by_sequence(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, sp_group: Optional[dist.ProcessGroup]
) -> torch.Tensor:
    """Sum `values` (rows, tokens, ...) by `sequence_ids` (rows, tokens) to (num_sequences, ...), all-reduced over sp.

    Sums are fp64, because a preference looks at small differences of large sums. Every sp rank gets every sum. The loss
    of these sums counts on only one sp rank, see `counts_here`. Values [1, 2, 4] of sequences [0, 1, 0] give [5, 2].
    """
    # a micro-batch without a sequence still has a token with id 0; its sum is removed
    sums = torch.zeros(max(num_sequences, 1), *values.shape[2:], dtype=torch.float64, device=values.device)
    sums = sums.index_add(0, sequence_ids.flatten(), values.flatten(0, 1).double())
    if sp_group is not None and sp_group.size() > 1:
        sums = Sum.apply(*SumGradients.apply(sp_group, sums), sp_group)  # backward sums too: any rank may use the sum
    return sums[:num_sequences]


def counts_here(sp_group: Optional[dist.ProcessGroup]) -> int:
    """Return 1 on the one sp rank whose loss, count and metrics of whole sequences are used, and 0 on the others."""
    return int(sp_group is None or sp_group.rank() == 0)

"""Values of every sample of a data set, from all ranks: for example reference log-probs, or scores for a plot."""

from collections.abc import Callable

import torch


@torch.no_grad()
def values_by_row(strategy, loader, values_of: Callable[[dict], torch.Tensor], num_rows: int) -> torch.Tensor:
    """A table (num_rows, 2), fp64, with `values_of(micro_batch)`, (n, 2), at the micro-batch's `rows`.

    A row without a sample is 0. It takes one pass over the loader and one all-reduce over dp x sp. If several ranks
    share a sample, one of them must give its values and the others zeros.
    """
    table = torch.zeros(num_rows, 2, dtype=torch.float64, device=strategy.device)
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    for batch in loader:
        for micro_batch in batch.micro_batches:
            table[micro_batch["rows"]] = values_of(micro_batch).double()
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    return strategy.all_reduce(table)

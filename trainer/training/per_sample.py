"""Numbers of every sample of a data set, whichever rank computed them: reference log-probs, scores for a picture."""

from collections.abc import Callable

import torch


@torch.no_grad()
def values_by_row(strategy, loader, values_of: Callable[[dict], torch.Tensor], num_rows: int) -> torch.Tensor:
    """(num_rows, 2) fp64: `values_of(micro_batch)`, (n, 2), at the micro-batch's `rows`; 0 for a row without a sample.

    One pass over the loader and one all-reduce over dp x sp: of the ranks that share a sample, one gives its values and
    the others zeros.
    """
    table = torch.zeros(num_rows, 2, dtype=torch.float64, device=strategy.device)
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    for batch in loader:
        for micro_batch in batch.micro_batches:
            table[micro_batch["rows"]] = values_of(micro_batch).double()
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    return strategy.all_reduce(table)

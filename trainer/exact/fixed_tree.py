"""Sums over pieces in one tree: how many ranks share the pieces changes no bit."""

import math

import torch
import torch.distributed as dist

PIECES = 8  # of a dimension that tp may split: over 1, 2, 4 or 8 ranks


class Alone:
    """In place of a process group or a mesh: one rank, which has all pieces. It can be no process group of torch's,
    since ranks make those together, and an engine does not communicate."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def get_group(self) -> "Alone":
        return self


def num_pieces(size_here: int, num_ranks: int) -> int:
    """Return how many pieces of a split dimension this rank holds. 8 pieces of 64 on 2 ranks give 4, of 12 give 2."""
    return math.gcd(max(PIECES // num_ranks, 1), size_here) if size_here else 1


def tree_sum(pieces: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Return ((0 + 1) + (2 + 3)) + ... over the pieces of all ranks of `group`, in their order (one all-gather)."""
    total = _by_pairs(pieces)
    if group.size() == 1:
        return total
    gathered = total.new_empty(group.size(), *total.shape)
    dist.all_gather_into_tensor(gathered.view(-1), total.reshape(-1), group=group)
    return _by_pairs(list(gathered))


def _by_pairs(pieces: list[torch.Tensor]) -> torch.Tensor:
    while len(pieces) > 1:
        rest = pieces[-1:] if len(pieces) % 2 else []
        pieces = [left + right for left, right in zip(pieces[::2], pieces[1::2])] + rest
    return pieces[0]

"""Sums over ranks of which each rank gets its part: whole numbers, so any order of the addition gives the same bits."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from trainer.exact.exact_sums import grid_of_squares, sum_of_squares

BUCKET = 1 << 22  # elements that one collective moves

Cut = Callable[[str, torch.Tensor, int], list[torch.Tensor]]  # (name, whole tensor, number of ranks) to a part for each


def flat_cut(_name: str, tensor: torch.Tensor, num_parts: int) -> list[torch.Tensor]:
    """Return stretches of the flat tensor of one size, the last ones shorter or empty. ZeRO 3 cuts in this way."""
    flat, size = tensor.reshape(-1), part_size(tensor.numel(), num_parts)
    return [flat[size * number : size * (number + 1)] for number in range(num_parts)]


def part_size(num_elements: int, num_parts: int) -> int:
    return -(-num_elements // num_parts)


def sum_parts(sums: dict[str, torch.Tensor], cut: Cut, group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this rank's part of the sum over the ranks), one all-to-all for each bucket. Empties `sums` on the way.

    A rank sends each element once: 8 bytes, where an all-reduce would send 16.
    """
    num_ranks, rank = group.size(), group.rank()
    while sums:
        names = _bucket(sums)
        cuts = [cut(name, sums.pop(name), num_ranks) for name in names]
        shapes = [parts[rank].shape for parts in cuts]
        if num_ranks == 1:
            yield from ((name, parts[0]) for name, parts in zip(names, cuts))
            continue
        sent = [torch.cat([parts[to].reshape(-1) for parts in cuts]) for to in range(num_ranks)]
        sizes, mine = [len(part) for part in sent], len(sent[rank])
        sent = torch.cat(sent)
        received = sent.new_empty(num_ranks, mine)
        dist.all_to_all_single(received.view(-1), sent, [mine] * num_ranks, sizes, group=group)
        found = received.sum(0).split([shape.numel() for shape in shapes])
        yield from ((name, part.view(shape)) for name, part, shape in zip(names, found, shapes))


def sums_of_squares(parts: list[torch.Tensor], sizes: list[int], groups: Sequence[dist.ProcessGroup]) -> list[float]:
    """Return the sum of the squares of each tensor, in any parts the same (two all-reduces of a number for each group).

    `parts` are those of this rank, fp32, and `sizes` the numbers of elements of whole tensors. The ranks of all `groups`
    together hold each element once.
    """
    largest = [torch.linalg.vector_norm(part, math.inf) if part.numel() else part.new_zeros(()) for part in parts]
    largest = torch.stack(largest).double()
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if not largest.isfinite().all():
        return [math.inf]
    grids = [grid_of_squares(most, size) for most, size in zip(largest.tolist(), sizes)]
    sums = torch.stack([sum_of_squares(part, grid) for part, grid in zip(parts, grids)])
    for group in groups:
        dist.all_reduce(sums, group=group)
    return [total * grid for total, grid in zip(sums.tolist(), grids)]


def _bucket(tensors: dict[str, torch.Tensor]) -> list[str]:
    """The first names whose tensors fill a bucket."""
    names, total = [], 0
    for name, tensor in tensors.items():
        if names and total + tensor.numel() > BUCKET:
            break
        names.append(name)
        total += tensor.numel()
    return names


def gather_parts(
    parts: dict[str, torch.Tensor], shapes: dict[str, torch.Size], group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of parts that `flat_cut` made, one all-gather for each bucket. Empties `parts`."""
    num_ranks = group.size()
    if num_ranks == 1:
        yield from ((name, parts.pop(name).view(shapes[name])) for name in list(parts))
    while parts:
        names = _bucket(parts)
        sizes = [part_size(shapes[name].numel(), num_ranks) for name in names]
        first = parts[names[0]]
        mine = first.new_zeros(sum(sizes))
        for name, place in zip(names, mine.split(sizes)):
            part = parts.pop(name)
            place[: part.numel()] = part.view(-1)
        found = first.new_empty(num_ranks, len(mine))
        dist.all_gather_into_tensor(found.view(-1), mine, group=group)
        for name, columns in zip(names, found.split(sizes, 1)):
            yield name, columns.reshape(-1)[: shapes[name].numel()].view(shapes[name])

"""Micro-batches measured in tokens: which rank gets which samples, and which samples share a micro-batch."""

import heapq
from collections.abc import Sequence
from typing import Optional

import numpy as np

MANY_RANKS = 32  # from here on, arrays over all ranks are faster than a loop over ranks


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: for each bin, its positions in `lengths`.

    A length above `capacity` gets a bin of its own. best_fit_bins([5, 4, 3, 2], 7) is [[0, 3], [1, 2]].
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # of equal lengths, the first first
    if sum(lengths) <= capacity:
        return [order] if order else []
    bins: list[list[int]] = []
    room: list[int] = []
    for position in order:
        length = lengths[position]
        fitting = [(free, b) for b, free in enumerate(room) if free >= length]
        if fitting:
            best = min(fitting)[1]
        else:
            best = len(bins)
            bins.append([])
            room.append(capacity)
        bins[best].append(position)
        room[best] -= length
    return bins


def balanced_owners(sizes: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each item, so that parts have nearly equal sums of `sizes`, (items,).

    The longest is first. Each goes to the part with the least so far (Graham 1969, Bounds on multiprocessing timing
    anomalies: within 4/3 of the best). Sizes 9, 5, 4, 4 in 2 parts give [0, 1, 1, 0].
    """
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order].astype(np.int64) * num_parts
    found = np.empty(len(sizes), np.int64)
    loads, done = np.arange(num_parts), 0  # load * num_parts + part: of equal loads, the first part
    while num_parts >= MANY_RANKS and done < len(sizes):
        # one item for each of the parts with the least, in order, until a part that just got one would be next again
        new = loads[: len(sizes) - done] + falling[done : done + num_parts]
        again = loads[1 : len(new)] > np.minimum.accumulate(new)[:-1]
        count = int(again.argmax()) + 1 if again.any() else len(new)
        found[order[done : done + count]] = loads[:count] % num_parts
        loads[:count] = new[:count]
        loads.sort()
        done += count
        if count < 16:  # such rounds cost more than the loop below
            break
    heap = loads.tolist()  # sorted, and so a heap
    for position, size in zip(order[done:].tolist(), falling[done:].tolist()):
        found[position] = heap[0] % num_parts
        heapq.heapreplace(heap, heap[0] + size)
    return found


def cut_micro_batches(
    items: list[int], lengths, *, max_tokens: Optional[int], packed_capacity: Optional[int]
) -> list[list[int]]:
    """Cut one rank's samples into micro-batches.

    Packed (`packed_capacity` tokens each): best-fit bins. By tokens: samples of similar length, with rows * longest row
    at most `max_tokens` (a longer sample gets its own batch).
    """
    if packed_capacity:
        bins = best_fit_bins([int(lengths[item]) for item in items], packed_capacity)
        return [[items[position] for position in bin] for bin in bins]
    micro_batches: list[list[int]] = []
    for item in sorted(items, key=lambda item: -int(lengths[item])):
        # sorted from long to short: the first row of a micro-batch is its longest
        if micro_batches and (len(micro_batches[-1]) + 1) * int(lengths[micro_batches[-1][0]]) <= max_tokens:
            micro_batches[-1].append(item)
        else:
            micro_batches.append([item])
    return micro_batches


def planned(sizes: np.ndarray, ranks: Sequence[int], num_ranks: int, **limits) -> list[list[list[int]]]:
    """The positions in `sizes` of the micro-batches of each of `ranks`. All ranks get about equal tokens.

    `limits` are those of `cut_micro_batches`. Ranks with fewer micro-batches than another one get empty ones at the end.
    """
    owners, lengths = balanced_owners(sizes, num_ranks), sizes.tolist()  # NumPy's own integers are slow
    plan = [cut_micro_batches(np.flatnonzero(owners == rank).tolist(), lengths, **limits) for rank in ranks]
    most = most_micro_batches(sizes, owners, num_ranks, **limits)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in plan]


def most_micro_batches(
    sizes: np.ndarray, owners: np.ndarray, num_parts: int, *, max_tokens: Optional[int], packed_capacity: Optional[int]
) -> int:
    """The largest number of micro-batches that a part is cut into: see `cut_micro_batches`. For all parts at once.

    Every rank runs as many, so a rank needs this number of the others, and not what they train.
    """
    order = np.lexsort((-sizes, owners))  # by part, the longest first
    counts = np.bincount(owners, minlength=num_parts)
    places = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
    falling = np.zeros((num_parts, counts.max()), np.int64)  # 0: no sample
    falling[owners[order], places] = sizes[order]
    return int((_bins(falling, packed_capacity) if packed_capacity else _token_bound(falling, max_tokens)).max())


def _token_bound(falling: np.ndarray, max_tokens: int) -> np.ndarray:
    """How many micro-batches each row of `falling` sizes makes, (parts,)."""
    count, rows, longest = np.zeros((3, len(falling)), np.int64)
    for size in falling.T:
        joins = ((rows + 1) * longest <= max_tokens) & (count > 0)
        rows = np.where(joins, rows + 1, 1)
        longest = np.where(joins, longest, size)
        count += ~joins & (size > 0)
    return count


def _bins(falling: np.ndarray, capacity: int) -> np.ndarray:
    """How many bins `best_fit_bins` makes of each row of `falling` sizes, (parts,)."""
    parts, full = np.arange(len(falling)), np.iinfo(np.int64).max
    count, room = np.zeros(len(falling), np.int64), np.zeros((len(falling), 0), np.int64)  # room: one column per bin
    for size in falling.T:
        if room.shape[1] <= count.max():
            room = np.pad(room, ((0, 0), (0, 4)), constant_values=-1)  # -1: no bin yet
        free = np.where(room >= size[:, None], room, full)
        best = free.argmin(1)
        opens = (free[parts, best] == full) & (size > 0)
        best = np.where(opens, count, best)
        room[parts[opens], count[opens]] = capacity
        count += opens
        used = size > 0
        room[parts[used], best[used]] -= size[used]
    return count

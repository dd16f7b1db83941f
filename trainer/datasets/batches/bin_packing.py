"""Micro-batches measured in tokens: which rank gets which samples, and which samples share a micro-batch.

Sizes 9, 5, 4, 4 on 2 ranks: rank 0 gets 9 and 4, rank 1 gets 5 and 4. With 9 tokens per packed micro-batch, rank 0 has
two micro-batches and rank 1 has one, to which an empty one is added.
"""

import heapq
from collections.abc import Sequence
from typing import Optional

import numpy as np

MANY_RANKS = 32  # from here on, arrays over all ranks are faster than a loop over ranks


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: for each bin, its positions in `lengths`.

    A length above `capacity` gets its own bin. best_fit_bins([5, 4, 3, 2], 7) is [[0, 3], [1, 2]].
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
    """The part of each item (items,), so that all parts have nearly equal sums of `sizes`.

    Items are taken from the largest to the smallest. Each goes to the part with the smallest sum so far (Graham 1969,
    Bounds on multiprocessing timing anomalies: within 4/3 of the best). Sizes 9, 5, 4, 4 in 2 parts give [0, 1, 1, 0].
    """
    order = np.argsort(-sizes, kind="stable")
    falling = sizes[order].astype(np.int64) * num_parts
    found = np.empty(len(sizes), np.int64)
    loads, done = np.arange(num_parts), 0  # load * num_parts + part: of equal loads, the first part
    while num_parts >= MANY_RANKS and done < len(sizes):
        # one item for each part, from the smallest sum, until a part that just got an item would be next again
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

    Packed (`packed_capacity` tokens each): best-fit bins. Padded: samples of similar length, with rows * longest row at
    most `max_tokens`; a longer sample gets its own micro-batch. Padded lengths 6, 3, 3, 2 with max_tokens 8 are cut to
    [6], [3, 3], [2].
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
    """For each of `ranks`, its micro-batches as positions in `sizes`. All ranks get about equally many tokens.

    `limits` go to `cut_micro_batches`. All ranks have equally many micro-batches: empty ones are added at the end.
    """
    owners, lengths = balanced_owners(sizes, num_ranks), sizes.tolist()  # NumPy's own integers are slow
    plan = [cut_micro_batches(np.flatnonzero(owners == rank).tolist(), lengths, **limits) for rank in ranks]
    most = most_micro_batches(sizes, owners, num_ranks, **limits)
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in plan]


def most_micro_batches(
    sizes: np.ndarray, owners: np.ndarray, num_parts: int, *, max_tokens: Optional[int], packed_capacity: Optional[int]
) -> int:
    """The largest number of micro-batches of any part, by `cut_micro_batches`. It is computed for all parts at once.

    Every rank runs this many micro-batches. So a rank needs only this number from the others, not their samples.
    """
    order = np.lexsort((-sizes, owners))  # by part, the longest first
    counts = np.bincount(owners, minlength=num_parts)
    places = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
    falling = np.zeros((num_parts, counts.max()), np.int64)  # 0: no sample
    falling[owners[order], places] = sizes[order]
    return int((_bins(falling, packed_capacity) if packed_capacity else _token_bound(falling, max_tokens)).max())


def _token_bound(falling: np.ndarray, max_tokens: int) -> np.ndarray:
    """The number of padded micro-batches of each part: (parts,). `falling`: (parts, items), sizes in falling order."""
    count, rows, longest = np.zeros((3, len(falling)), np.int64)
    for size in falling.T:
        joins = ((rows + 1) * longest <= max_tokens) & (count > 0)
        rows = np.where(joins, rows + 1, 1)
        longest = np.where(joins, longest, size)
        count += ~joins & (size > 0)
    return count


def _bins(falling: np.ndarray, capacity: int) -> np.ndarray:
    """The number of bins that `best_fit_bins` makes for each part: (parts,). `falling` as in `_token_bound`."""
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

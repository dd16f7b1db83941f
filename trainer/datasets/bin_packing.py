"""Which documents share a packed row, and which samples a rank gets if ranks should have equal tokens."""

import heapq
from collections.abc import Sequence


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


def balanced_parts(items: list[int], lengths, num_parts: int) -> list[list[int]]:
    """Split `items` into parts with nearly equal numbers of tokens. Each part keeps the order of `items`.

    The longest is first. Each goes to the part with the fewest tokens so far (Graham 1969, Bounds on multiprocessing
    timing anomalies: within 4/3 of the best). Lengths 9, 5, 4, 4 in 2 parts give [9, 4] and [5, 4].
    """
    sizes, loads = [int(lengths[item]) for item in items], [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for position in sorted(range(len(items)), key=sizes.__getitem__, reverse=True):  # of equal ones, the first first
        load, part = loads[0]
        parts[part].append(position)
        heapq.heapreplace(loads, (load + sizes[position], part))
    return [[items[position] for position in sorted(part)] for part in parts]

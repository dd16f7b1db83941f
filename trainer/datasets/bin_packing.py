"""Which documents share a packed row."""

from collections.abc import Sequence


def best_fit_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: for each bin, its positions in `lengths`.

    A length above `capacity` gets a bin of its own. best_fit_bins([5, 4, 3, 2], 7) is [[0, 3], [1, 2]].
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b, free in enumerate(room) if free >= lengths[position]]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
        else:
            best = len(bins)
            bins.append([])
            room.append(capacity)
        bins[best].append(position)
        room[best] -= lengths[position]
    return bins

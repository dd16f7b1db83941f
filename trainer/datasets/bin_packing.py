"""Which documents share a packed row."""

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

"""The slices of weights that the engine of each rank needs, sent by the ranks that have them.

A box is a range of each dimension of a whole tensor. Each rank has a few boxes of a tensor, and needs one. A rank takes
what it has itself, and gets the rest by all-to-all. So it receives no more than its slice, whatever the layout.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Optional

import torch
import torch.distributed as dist

from trainer.distributed.collectives import gather_objects

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def box_of(sizes: Iterable[int]) -> Box:
    return tuple((0, size) for size in sizes)


def overlap(box: Box, other: Box) -> Optional[Box]:
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def inside(tensor: torch.Tensor, place: Box, box: Box) -> torch.Tensor:
    """The part `box` of a tensor whose elements are the box `place` of the whole."""
    return tensor[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, place))]


def stretches(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Elements [start, stop) of a flattened tensor as boxes, in order: whole rows, and parts of the first and last row.

    Elements [5, 12) of a (4, 3) tensor are the boxes ((1, 2), (2, 3)) and ((2, 4), (0, 3)).
    """
    if len(shape) < 2:
        if start < stop:
            yield ((start, stop),)
        return
    row = math.prod(shape[1:])
    while start < stop:
        number, offset = divmod(start, row)
        if offset or stop - start < row:
            end = min(stop, (number + 1) * row)
            yield from (((number, number + 1), *box) for box in stretches(offset, offset + end - start, shape[1:]))
        else:
            end = stop // row * row
            yield ((number, end // row), *box_of(shape[1:]))
        start = end


def parts_of(piece) -> tuple[tuple[int, ...], list[tuple[Box, torch.Tensor]]]:
    """(shape of the whole tensor, boxes of it that this rank has, with their values) of a `bucketed_gather.Piece`."""
    tensor = piece.tensor.detach()
    shape, parts = tuple(tensor.shape), [(box_of(tensor.shape), tensor)]
    for sharding in piece.shardings:
        first = sum(sharding.sizes[: dist.get_rank(sharding.group)])
        shape = (*shape[: sharding.dim], sum(sharding.sizes), *shape[sharding.dim + 1 :])
        parts = [
            (
                tuple(
                    (a + first * (dim == sharding.dim), b + first * (dim == sharding.dim))
                    for dim, (a, b) in enumerate(box)
                ),
                part,
            )
            for box, part in parts
        ]
        if sharding.shape is not None:  # a stretch of the flattened tensor
            [(((start, stop),), flat)], shape = parts, sharding.shape
            ends = itertools.accumulate((_size(box) for box in stretches(start, stop, shape)), initial=0)
            parts = [
                (box, flat[at : at + _size(box)].view([b - a for a, b in box]))
                for at, box in zip(ends, stretches(start, stop, shape))
            ]
    return shape, [(box, part) for box, part in parts if part.numel()]


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


class Slices:
    """Which slice of each tensor every rank needs, and who sends it. The first sync plans it for the whole run."""

    def __init__(self, wanted: Callable[[str, tuple[int, ...]], Box]):
        """`wanted(name, shape)`: the box that this rank needs of a tensor."""
        self._wanted = wanted
        self._routes: dict[str, dict[tuple[int, int], list[Box]]] = {}  # name: {(from, to): boxes}
        self.boxes: dict[str, tuple[tuple[int, ...], list[Box]]] = {}  # name: the whole shape, and each rank's slice
        self.received = 0  # bytes that came from other ranks in the last sync

    def of(self, pieces: Iterable, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, this rank's slice) of each piece, in order (all-to-all over the world, many tensors at a time)."""
        pieces, self.received = list(pieces), 0
        found = [parts_of(piece) for piece in pieces]
        if not self._routes:
            self._plan([piece.name for piece in pieces], found)
        bucket, size = [], 0
        for piece, (_, parts) in zip(pieces, found):
            size += piece.num_bytes()
            if bucket and size > bucket_bytes:
                yield from self._exchange(bucket)
                bucket, size = [], piece.num_bytes()
            bucket.append((piece, parts))
        yield from self._exchange(bucket)

    def _plan(self, names: list[str], found: list) -> None:
        """Choose who sends what (all-gather over the world of boxes, once). A rank with equal parts sends to itself."""
        mine = {
            name: (shape, self._wanted(name, shape), [box for box, _ in parts])
            for name, (shape, parts) in zip(names, found, strict=True)
        }
        on_ranks = gather_objects(mine)
        for name, (shape, *_) in mine.items():
            holders: dict[Box, list[int]] = {}
            for rank, of_rank in enumerate(on_ranks):
                for box in of_rank[name][2]:
                    holders.setdefault(box, []).append(rank)
            routes: dict[tuple[int, int], list[Box]] = {}
            for to, of_rank in enumerate(on_ranks):
                for box, ranks in holders.items():
                    if part := overlap(box, of_rank[name][1]):
                        routes.setdefault((to if to in ranks else ranks[to % len(ranks)], to), []).append(part)
            assert sum(_size(box) for boxes in routes.values() for box in boxes) == sum(
                _size(t[name][1]) for t in on_ranks
            )
            self._routes[name] = routes
            self.boxes[name] = shape, [of_rank[name][1] for of_rank in on_ranks]

    @torch.no_grad()
    def _exchange(self, bucket: list) -> Iterator[tuple[str, torch.Tensor]]:
        rank, size = dist.get_rank(), dist.get_world_size()
        cast = [[(box, part.to(piece.dtype)) for box, part in parts] for piece, parts in bucket]
        sends: list[list[torch.Tensor]] = [[] for _ in range(size)]
        sizes = [0] * size
        for to, source in itertools.product(range(size), range(size)):
            for (piece, _), parts in zip(bucket, cast):
                for box in self._routes[piece.name].get((source, to), ()):
                    if source == rank != to:
                        place, part = next((place, part) for place, part in parts if overlap(place, box))
                        sends[to].append(inside(part, place, box).contiguous().flatten().view(torch.uint8))
                    elif to == rank != source:
                        sizes[source] += _size(box) * piece.dtype.itemsize
        like = bucket[0][0].tensor.new_empty(0, dtype=torch.uint8)
        coming = like.new_empty(sum(sizes))
        if size > 1:
            sent = torch.cat([like, *itertools.chain.from_iterable(sends)])
            dist.all_to_all_single(coming, sent, sizes, [sum(part.numel() for part in to) for to in sends])
        self.received += coming.numel()
        yield from self._assembled(bucket, cast, list(coming.split(sizes)))

    def _assembled(self, bucket: list, cast: list, coming: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        rank = dist.get_rank()
        for (piece, _), parts in zip(bucket, cast):
            mine = self.boxes[piece.name][1][rank]
            found = piece.tensor.new_empty([stop - start for start, stop in mine], dtype=piece.dtype)
            for source, received in enumerate(coming):
                for box in self._routes[piece.name].get((source, rank), ()):
                    if source == rank:
                        place, part = next((place, part) for place, part in parts if overlap(place, box))
                        inside(found, mine, box).copy_(inside(part, place, box))
                        continue
                    num_bytes = _size(box) * piece.dtype.itemsize
                    target = inside(found, mine, box)
                    target.copy_(received[:num_bytes].clone().view(piece.dtype).view(target.shape))
                    coming[source] = received = received[num_bytes:]
            yield piece.name, found


_active: list[Slices] = []


@contextlib.contextmanager
def only_slices(slices: Slices):
    """Inside, `bucketed_gather.gathered` yields this rank's slices instead of whole tensors."""
    _active.append(slices)
    try:
        yield
    finally:
        _active.pop()


def active() -> Optional[Slices]:
    return _active[-1] if _active else None

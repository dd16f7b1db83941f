"""Whole tensors from the parts of all ranks, many tensors in one all-gather. Ranks cast their parts before they send them.

In bf16 a rank sends and receives less than 2 bytes per weight. One all-gather per tensor in fp32 would send twice that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainer.distributed import weight_slices

BUCKET_BYTES = 2**26  # of gathered tensors; a larger tensor has a bucket of its own


@dataclass(frozen=True)
class Sharding:
    """A tensor is split along `dim` into parts of `sizes`, one for each rank of `group`. The whole then gets `shape`."""

    dim: int
    sizes: tuple[int, ...]
    group: dist.ProcessGroup
    shape: Optional[tuple[int, ...]] = None


@dataclass
class Piece:
    """This rank's part of a tensor, the dtype to send it in, and its shardings. The last sharding comes first."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    shardings: list[Sharding] = field(default_factory=list)

    def num_bytes(self) -> int:
        size = self.tensor.numel() * self.dtype.itemsize
        for sharding in self.shardings:
            size *= len(sharding.sizes)
        return size


def chunk_sizes(size: int, count: int) -> tuple[int, ...]:
    """The sizes of `torch.chunk`, with 0 for missing chunks: 5 in 4 parts are 2, 2, 1 and 0."""
    most = -(-size // count)
    return tuple(max(0, min(most, size - most * part)) for part in range(count))


def piece_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Piece:
    """The piece of a DTensor, or of a tensor that every rank has whole. Integers keep their dtype."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Piece(name, tensor, dtype)
    mesh, placements = tensor.device_mesh, tensor.placements
    # fully_shard shards what tp has sharded. A second sharding of the same dimension is strided, and is undone first
    strided = [axis for axis, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    plain = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    shardings, shape = [], list(tensor.shape)
    for axis in reversed([*strided, *reversed(plain)]):
        dim, group = placements[axis].dim, mesh.get_group(axis)
        sizes = chunk_sizes(shape[dim], group.size())
        shape[dim] = sizes[mesh.get_local_rank(axis)]
        if group.size() > 1:
            shardings.insert(0, Sharding(dim, sizes, group))
    return Piece(name, tensor.to_local().reshape(shape), dtype, shardings)


def gathered(pieces: Iterable[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each piece, in order. All ranks give the same names (all-gathers over their groups).

    Inside `weight_slices.only_slices`, the tensors are the slices that this rank needs (all-to-all over the world).
    """
    if slices := weight_slices.active():
        yield from slices.of(pieces, BUCKET_BYTES)
        return
    bucket: list[Piece] = []
    for piece in pieces:
        if bucket and sum(other.num_bytes() for other in bucket) + piece.num_bytes() > BUCKET_BYTES:
            yield from _whole(bucket)
            bucket = []
        bucket.append(piece)
    yield from _whole(bucket)


@torch.no_grad()
def _whole(bucket: list[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = [piece.tensor.to(piece.dtype) for piece in bucket]
    for depth in range(max((len(piece.shardings) for piece in bucket), default=0)):
        together: dict[dist.ProcessGroup, list[int]] = {}
        for number, piece in enumerate(bucket):
            if depth < len(piece.shardings):
                together.setdefault(piece.shardings[depth].group, []).append(number)
        for group, numbers in together.items():
            found = _gather([(tensors[number], bucket[number].shardings[depth]) for number in numbers], group)
            for number, tensor in zip(numbers, found):
                tensors[number] = tensor
    for piece, tensor in zip(bucket, tensors):
        yield piece.name, tensor


def _gather(parts: list[tuple[torch.Tensor, Sharding]], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The whole tensors of `parts`, by one all-gather over `group`. Shorter parts are padded."""
    rank, padded = dist.get_rank(group), []
    for part, sharding in parts:
        missing = max(sharding.sizes) - sharding.sizes[rank]
        rest = part.new_zeros(*part.shape[: sharding.dim], missing, *part.shape[sharding.dim + 1 :])
        padded.append(torch.cat([part, rest], sharding.dim) if missing else part.contiguous())
    own = torch.cat([part.flatten().view(torch.uint8) for part in padded])
    rows = own.new_empty(group.size(), len(own))
    dist.all_gather_single(rows.flatten(), own, group=group)
    del own
    columns = rows.split([part.nbytes for part in padded], 1)
    return [_joined(column, part, sharding) for column, part, (_, sharding) in zip(columns, padded, parts)]


def _joined(rows: torch.Tensor, like: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """A whole tensor from the bytes of its padded parts, (ranks, bytes)."""
    if any(row.storage_offset() % like.itemsize for row in rows):
        rows = [row.clone() for row in rows]  # a view of another dtype must begin at a whole element
    parts = [
        row.view(like.dtype).view(like.shape).narrow(sharding.dim, 0, size) for row, size in zip(rows, sharding.sizes)
    ]
    whole = torch.cat(parts, sharding.dim)
    return whole if sharding.shape is None else whole.view(sharding.shape)

"""Tensors of a checkpoint. Every rank writes the shards that it holds. A rank of any layout reads the parts it needs.

A tensor has the same key on every backend and layout. The key is `weight/`, or the optimizer's name such as `exp_avg/`,
and then the Hugging Face name of the parameter. A shard is a box of the full tensor, or a stretch of a flattened box
(ZeRO's partitions). The files are safetensors. If all shards are boxes, the HuggingFaceStorageReader of
torch.distributed.checkpoint can also read them.
"""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.piece_index import Piece, open_index
from trainer.distributed.weight_slices import stretches
from trainer.errors import UserError
from trainer.model_folders.safetensors_stream import file_parts

MAX_FILE_BYTES = 256 << 20
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the full tensor, size


@dataclass(frozen=True)
class TensorShard:
    """This rank's part of the full tensor `key`. `tensor` is its live storage, to save from and to load into.

    It is the box of size `box` at `offset`. With `start`, it is the elements from `start` on of that box, flattened.
    Example: rank 1 of 2 and a (4, 3) tensor. Under FSDP2: offset (2, 0), box (2, 3). Under ZeRO: offset (0, 0),
    box (4, 3), start 6.
    """

    key: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: Optional[int]
    tensor: torch.Tensor
    is_written: bool = True  # False if another rank writes the same shard

    def boxes(self) -> list[Box]:
        """The shard as boxes of the full tensor, in the order of its elements."""
        stop = None if self.start is None else self.start + self.tensor.numel()
        return _boxes(self.offset, self.box, self.start, stop)


def whole_shard(key: str, tensor: torch.Tensor, is_written: bool) -> TensorShard:
    """A shard that is the whole tensor."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape) or (1,)
    return TensorShard(key, shape, (0,) * len(shape), shape, None, tensor.view(shape), is_written)


def flat_shard(key: str, full_shape: tuple[int, ...], start: int, tensor: torch.Tensor, is_written=True) -> TensorShard:
    """A shard with elements [start, start + numel) of the flattened full tensor."""
    shape = tuple(full_shape) or (1,)
    return TensorShard(key, shape, (0,) * len(shape), shape, start, tensor.detach().flatten(), is_written)


def shard_of(key: str, tensor: torch.Tensor) -> TensorShard:
    """The part that this rank holds of a DTensor, or a tensor that is whole on every rank.

    If several ranks hold equal parts, one of them writes. It depends on the key, so that replicas share the writing.
    """
    if not isinstance(tensor, DTensor):
        return whole_shard(key, tensor, is_written=dist.get_rank() == 0)
    box, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    replica, num_replicas = 0, 1
    for at, size, placement in zip(tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, tensor.placements):
        if placement.is_replicate():  # not `is_shard()`: it is False for the strided shard of tp and fsdp
            replica, num_replicas = replica * size + at, num_replicas * size
    is_writer = zlib.crc32(key.encode()) % num_replicas == replica
    return TensorShard(key, tuple(tensor.shape), tuple(offset), tuple(box), None, tensor.detach().to_local(), is_writer)


def boxes_of_stretch(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a flattened tensor as boxes, in order.

    Elements [5, 12) of a (4, 3) tensor are the boxes (1, 2) with size (1, 1) and (2, 0) with size (2, 3).
    """
    found = stretches(start, stop, shape)
    return [(tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in found]


def _boxes(offset, box, start: Optional[int], stop: Optional[int]) -> list[Box]:
    if start is None:
        return [(tuple(offset), tuple(box))]
    inner = boxes_of_stretch(tuple(box), start, stop)
    return [(tuple(o + i for o, i in zip(offset, inside)), size) for inside, size in inner]


def write_shards(shards: Iterable[TensorShard], folder: str, prefix: str) -> tuple[dict[str, dict], list[Piece]]:
    """Write shards to safetensors files `<prefix>-<number>`. Returns (manifest entries, pieces). Raises OSError."""
    entries, pieces = {}, []
    for number, group in enumerate(_in_files(shards)):
        name = f"{prefix}-{number:05d}.safetensors"
        parts = file_parts({shard.key: shard.tensor for shard in group}, _file_metadata(group))
        entries[name] = store.write_parts(os.path.join(folder, name), parts)
        pieces += [Piece(s.key, s.full_shape, name, s.offset, s.box, s.start, s.tensor.numel()) for s in group]
    return entries, pieces


def _in_files(shards: Iterable[TensorShard]) -> Iterator[list[TensorShard]]:
    group: list[TensorShard] = []
    size = 0
    for shard in shards:
        if not shard.is_written or not shard.tensor.numel():
            continue
        if group and size + shard.tensor.nbytes > MAX_FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(shard)
        size += shard.tensor.nbytes
    if group:
        yield group


def _file_metadata(group: list[TensorShard]) -> dict[str, str]:
    own = {p.key: {"shape": p.full_shape, "offset": p.offset, "box": p.box, "start": p.start} for p in group}
    # the safetensors reader of torch.distributed.checkpoint uses the last entry
    offsets = {shard.key: {"saved_offsets": shard.offset} for shard in group}
    return {"format": "pt", "pieces": json.dumps(own), "DCP_SHARDING_INFO": json.dumps(offsets)}


class ShardReader:
    """The full tensors of a checkpoint by key. Any part can be read, for any form of the written shards.

    Only files with elements of that part are opened.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._index, self._open = open_index(folder), {}
        self._wanted: dict[str, dict] = {}
        self.shapes = self._index.shapes

    def whole_files(self, shards: Iterable[TensorShard]) -> set[str]:
        """Files whose every piece is in `shards`, unchanged. On the same layout, they are a rank's own files."""
        found = Counter()
        for shard in shards:
            if shard.tensor.numel() and self.shapes.get(shard.key) == shard.full_shape:
                same = (shard.offset, shard.box, shard.start, shard.tensor.numel())
                pieces = self._index.overlapping(shard.key, *shard.boxes()[0])
                found.update({piece.file for piece in pieces if tuple(piece[3:]) == same})
        return {name for name, count in found.items() if self._index.counts.get(name) == count}

    def hash_while_reading(self, wanted: dict[str, dict]) -> None:
        """Hash each file of `wanted` (its entries in the manifest) before its first piece is read.

        A read raises DamagedFile if the file does not fit its entry. Pieces are mapped, so the system still has the bytes.
        """
        self._wanted = wanted

    def _handle(self, name: str):
        if name not in self._open:
            damage = name in self._wanted and store.file_damage(self.folder, name, self._wanted[name])
            if damage:
                raise store.DamagedFile(damage)
            self._open[name] = safe_open(os.path.join(self.folder, name), framework="pt")
        return self._open[name]

    def read(self, shard: TensorShard) -> torch.Tensor:
        """The saved values of `shard`, in the shape of its tensor. Raises UserError if any of them are missing."""
        if self.shapes.get(shard.key) != shard.full_shape:
            found = self.shapes.get(shard.key)
            found = f"{shard.key} of shape {found}" if found else f"no {shard.key}"
            raise UserError("--load_checkpoint", f"{self.folder} has {found}", f"shape {shard.full_shape}")
        parts = [self._read_box(shard.key, *box) for box in shard.boxes()]
        if shard.start is None:
            return parts[0]
        return torch.cat([part.flatten() for part in parts]) if parts else shard.tensor.new_empty(0)

    def read_full(self, key: str) -> torch.Tensor:
        shape = self.shapes[key]
        return self._read_box(key, (0,) * len(shape), shape)

    def _stored(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> dict[Box, tuple]:
        """{stored box: (file, position in a flat shard or None)} of the files near a box."""
        stored = {}
        for piece in self._index.overlapping(key, offset, size):
            stop, position = None if piece.start is None else piece.start + piece.length, 0
            for box in _boxes(piece.offset, piece.box, piece.start, stop):
                stored[box] = piece.file, None if stop is None else position
                position += math.prod(box[1])
        return stored

    def _read_box(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        result, covered = None, 0
        for (other_offset, other_size), (file, position) in self._stored(key, offset, size).items():
            low = [max(a, b) for a, b in zip(offset, other_offset)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, size, other_offset, other_size)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, other_offset))
            part = _read_stored(self._handle(file), key, position, other_size, inside)
            if part.numel() == math.prod(size):  # the whole box, so it needs no copy
                return part.reshape(size)
            result = torch.empty(size, dtype=part.dtype) if result is None else result
            result[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset))] = part
            covered += part.numel()
        if covered != math.prod(size):
            raise UserError(
                "--load_checkpoint", f"{self.folder} holds {covered} of {math.prod(size)} elements of {key}"
            )
        return torch.empty(size) if result is None else result


def _read_stored(handle, key: str, position: Optional[int], size: tuple[int, ...], inside) -> torch.Tensor:
    if position is None:
        return handle.get_slice(key)[inside]
    row = math.prod(size[1:])
    rows = inside[0]
    stretch = handle.get_slice(key)[position + rows.start * row : position + rows.stop * row]
    return stretch.view(-1, *size[1:])[(slice(None), *inside[1:])]


def full_shards(reader: ShardReader, part: int = 0, num_parts: int = 1) -> Iterator[TensorShard]:
    """Every `num_parts`-th full tensor of a checkpoint, from number `part`. All parts form the portable checkpoint."""
    for key in sorted(reader.shapes)[part::num_parts]:
        yield whole_shard(key, reader.read_full(key), True)

"""Sharded tensors (DTensor): this rank's part, its place in the full tensor, and the full tensor."""

import itertools
from typing import Optional

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, detached (all-gather over the mesh of a DTensor)."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local_region(tensor: torch.Tensor) -> Optional[tuple[slice, ...]]:
    """Return the part of the full tensor that this rank holds, as one slice per dimension. None means all of it."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def part_of(tensor: torch.Tensor, like: torch.Tensor, is_part: bool = False) -> torch.Tensor:
    """Return `tensor` sharded like `like`: a DTensor of this rank's part, which is a copy, or `tensor` itself.

    `is_part`: it is this rank's part already, and is not copied.
    """
    if not isinstance(like, DTensor):
        return tensor
    local = tensor if is_part else tensor[local_region(like)].clone()
    facts = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **facts)


def sharded_logits(vocab_size: int, tp_mesh, logits: torch.Tensor) -> DTensor:
    """This rank's part of logits (rows, tokens, vocab) as a DTensor, which is sharded over the vocabulary."""
    shape, stride = (*logits.shape[:-1], vocab_size), (logits.shape[1] * vocab_size, vocab_size, 1)
    return DTensor.from_local(logits, tp_mesh, [Shard(2)], run_check=False, shape=torch.Size(shape), stride=stride)


def chunks(tensor: torch.Tensor, num_parts: int, dim: int) -> list[torch.Tensor]:
    """Return the part of each rank, as Shard(dim) cuts: of 5 rows on 4 ranks 2, 2, 1 and 0."""
    size = -(-tensor.shape[dim] // num_parts)
    starts = [min(size * number, tensor.shape[dim]) for number in range(num_parts + 1)]
    return [tensor.narrow(dim, start, end - start) for start, end in itertools.pairwise(starts)]


def even_dim(shape: tuple[int, ...], num_ranks: int) -> Optional[int]:
    """Return the first dimension that `num_ranks` divides, or None. 4 experts (4, 48, 32) on 3 ranks give 1."""
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0), None)


def even_placement(parameter: torch.Tensor, num_ranks: int) -> Optional[Shard]:
    """Return how fully_shard shards stacked experts. None is the first dimension, which it pads: 16 experts on 256 ranks."""
    dim = even_dim(parameter.shape, num_ranks) if parameter.ndim > 2 else None
    return None if dim is None else Shard(dim)

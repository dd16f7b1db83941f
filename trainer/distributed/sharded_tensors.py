"""Tensors that a mesh may have cut: this rank's part, its place in the full tensor, and the full tensor."""

from typing import Optional

import torch
from torch.distributed.tensor import DTensor
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

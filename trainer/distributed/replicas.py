"""The replica sentinel: it compares tensors bit by bit that should be equal on several ranks."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError


def check_replicas(
    tensors: Iterable[tuple[str, torch.Tensor, list[str]]], groups: Mapping[str, dist.ProcessGroup]
) -> None:
    """Compare each local tensor over the process groups of the mesh axes along which it is a replica.

    `tensors` yields (name, this rank's tensor, names of these axes). Names and axes are the same on every rank.
    `groups` maps an axis to this rank's group along it. The check all-gathers 16 bytes per tensor over each group.
    Then it all-gathers one verdict per rank over the whole world, so that every rank raises the same error.

    Raises:
        UserError: a tensor differs. The error names the first such tensor and the axis.
    """
    names, digests, compared = [], [], []
    for name, tensor, axes in tensors:
        names.append(name)
        digests.append(_digest(tensor) if axes else b"")
        compared.append(axes)
    differing = [(len(names), 0)]  # (number of the tensor, number of the axis)
    for axis_number, (axis, group) in enumerate(groups.items()):
        own = [digest if axis in axes else b"" for digest, axes in zip(digests, compared)]
        columns = zip(*gather_objects(own, group))
        differing += [(number, axis_number) for number, column in enumerate(columns) if len(set(column)) > 1]
    number, axis_number = min(gather_objects(min(differing)))
    if number < len(names):
        found = f"{names[number]} differs between ranks of the mesh axis {list(groups)[axis_number]}"
        raise UserError("--check_replicas_every", found, "bitwise equal replicas")


def replicated_axes(tensor: torch.Tensor, axes: Iterable[str]) -> list[str]:
    """The mesh axes along which all ranks should hold the same local tensor. efsdp and ep make fsdp, see Meshes."""
    sharded = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names
        sharded = {name for name, placement in zip(names, tensor.placements) if not placement.is_replicate()}
    if "ep" in sharded:
        sharded.add("fsdp")
    return [axis for axis in axes if axis not in sharded]


def _digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=16).digest()

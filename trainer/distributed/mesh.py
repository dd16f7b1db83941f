"""The place of a rank: its device, random seeds, process group, and the mesh (dp_replicate, dp_shard, sp, tp)."""

import functools
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.distributed import collectives
from trainer.distributed.determinism import use_deterministic_kernels
from trainer.distributed.mesh_sizes import MeshSizes
from trainer.errors import UserError

AXES = ("dp_replicate", "dp_shard", "sp", "tp")


def resolve_device(device: str) -> torch.device:
    """Return this rank's device for `--device auto|cpu|cuda`. Ranks share a GPU if there are more ranks than GPUs."""
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise UserError("--device", "cuda, but torch finds no CUDA device", "cpu, auto")
    if device == "cpu" or not cuda:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def start_process_group(device: torch.device, host_tensors: bool = False) -> None:
    """Join torchrun's process group, over NCCL on CUDA and gloo on CPU. Without torchrun, make a group of one rank.

    With `host_tensors`, collectives take tensors in host memory as well as tensors on the device.
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if host_tensors else "nccl"
    if "RANK" in os.environ:
        if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise UserError("RANK", f"is set without {', '.join(missing)}", "torchrun, which sets all; or unset RANK")
        # with the device known, NCCL derives the groups of a mesh from one communicator
        known = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, **known)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        collectives.make_patient_group(dist.group.WORLD)


def seed_everything(seed: int, deterministic: bool, device: torch.device) -> None:
    """Seed Python, NumPy and torch equally on every rank. With `deterministic`, ask CUDA for deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic and device.type == "cuda":
        use_deterministic_kernels()


@dataclass(frozen=True)
class Meshes:
    """The device mesh and the parts of it that the strategies use.

    A process group is a communicator with memory of its own. Meshes over the same ranks share one.

    `root` is the four-dimensional mesh. `dp` has one place per slice of the global batch. `loss` (dp x sp) has one per
    rank with different tokens. Weights are laid out on `params`: (dp_replicate, fsdp, tp), where fsdp = dp_shard x sp.
    """

    root: DeviceMesh
    dp: DeviceMesh
    loss: DeviceMesh
    params: DeviceMesh


def build_meshes(sizes: MeshSizes, device: torch.device) -> Meshes:
    """Build the process groups of every mesh axis. All ranks call this together if the layout is new to the process."""
    return _build_meshes(sizes, device.type, dist.group.WORLD)


@functools.cache  # a gloo group polls in its own thread forever: many runs in one process must share their groups
def _build_meshes(sizes: MeshSizes, device_type: str, world: dist.ProcessGroup) -> Meshes:
    shape = (sizes.dp_replicate, sizes.dp_shard, sizes.sp, sizes.tp)
    root = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    known: dict[tuple, dist.ProcessGroup] = {}  # axes of more than one rank -> their group

    def group(*axes: str) -> dist.ProcessGroup:
        wide = tuple(axis for axis in axes if root[axis].size() > 1)
        if wide not in known:
            joined = root[axes]._flatten("_".join(axes)) if len(wide) > 1 else root[wide[0] if wide else axes[0]]
            known[wide] = joined.get_group()
        return known[wide]

    dp, loss = group("dp_replicate", "dp_shard"), group("dp_replicate", "dp_shard", "sp")
    of_params = [group("dp_replicate"), group("dp_shard", "sp"), group("tp")]
    names = ("dp_replicate", "fsdp", "tp")
    return Meshes(
        root=root,
        dp=DeviceMesh.from_group(dp, device_type, mesh_dim_names=("dp",)),
        loss=DeviceMesh.from_group(loss, device_type, mesh_dim_names=("loss",)),
        params=DeviceMesh.from_group(of_params, device_type, root.mesh.flatten(1, 2), mesh_dim_names=names),
    )

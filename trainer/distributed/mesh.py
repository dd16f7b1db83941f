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
from trainer.errors import UserError

AXES = ("dp_replicate", "dp_shard", "sp", "tp")


@dataclass(frozen=True)
class MeshSizes:
    """Number of ranks along each mesh axis. tp is the innermost axis."""

    dp_replicate: int
    dp_shard: int
    sp: int
    tp: int

    @property
    def dp(self) -> int:
        """Number of different slices of the global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.sp * self.tp


def resolve_mesh_sizes(world_size: int, *, dp_replicate: int = 1, sp: int = 1, tp: int = 1) -> MeshSizes:
    """Return the mesh sizes of `world_size` ranks. dp_shard is `world_size` / (`dp_replicate` * `sp` * `tp`).

    8 ranks with sp 2 and tp 2 give (dp_replicate 1, dp_shard 2, sp 2, tp 2).

    Raises:
        UserError: `world_size` is not a multiple of `dp_replicate * sp * tp`.
    """
    unit = dp_replicate * sp * tp
    if world_size % unit:
        raise UserError(
            "--dp_replicate_size * --ring_attn_size * --tensor_parallel_size",
            f"{dp_replicate} * {sp} * {tp} = {unit} does not divide the {world_size} ranks started by torchrun",
            f"a multiple of {unit} ranks",
        )
    return MeshSizes(dp_replicate, world_size // unit, sp, tp)


def validate_batch_sizes(train_batch_size: int, micro_batch_size: int, dp: int) -> None:
    """Raise UserError unless each of `dp` ranks gets the same number of whole micro-batches."""
    if train_batch_size % (micro_batch_size * dp) == 0:
        return
    per_rank = train_batch_size // dp
    fits = [size for size in range(1, per_rank + 1) if train_batch_size % (size * dp) == 0]
    allowed = (
        f"--micro_train_batch_size {', '.join(map(str, fits))}"
        if fits
        else f"a --train_batch_size that is a multiple of {dp}"
    )
    raise UserError(
        "--train_batch_size",
        f"{train_batch_size} is not a multiple of --micro_train_batch_size {micro_batch_size} "
        f"times {dp} data-parallel ranks",
        allowed,
    )


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
        dist.init_process_group(backend)
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
    params = init_device_mesh(
        device_type,
        (sizes.dp_replicate, sizes.dp_shard * sizes.sp, sizes.tp),
        mesh_dim_names=("dp_replicate", "fsdp", "tp"),
    )
    return Meshes(
        root=root,
        dp=root["dp_replicate", "dp_shard"]._flatten("dp"),
        loss=root["dp_replicate", "dp_shard", "sp"]._flatten("loss"),
        params=params,
    )

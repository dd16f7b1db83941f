"""A model that AutoTP has sharded: the groups of our mesh, and full tensors from its shards. See also autotp_layers."""

import dataclasses

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.utils import groups

from trainer.checkpoints.shards import TensorShard


def use_mesh_groups(meshes) -> None:
    """Give DeepSpeed the groups of our mesh. Otherwise, it builds its own, once per process."""
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = meshes.root["tp"].get_group()
    groups._DATA_PARALLEL_GROUP = meshes.loss.get_group()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = hpz_group(meshes)


def hpz_group(meshes) -> dist.ProcessGroup | None:
    """The ranks that hold one full set of weights under ZeRO++ hpZ (dp_shard x sp); None without dp_replicate."""
    return meshes.params["fsdp"].get_group() if meshes.params["dp_replicate"].size() > 1 else None


def partition_of(parameter: torch.nn.Parameter) -> tuple[int, list[int]] | None:
    """(dimension, size of each rank's part) of a parameter that AutoTP shards; None for a replicated one."""
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"] or meta["partition_dim"] is None:
        return None
    return meta["partition_dim"], list(meta["partition_sizes"])


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    return partition_of(parameter) is not None


def gather(parameter: torch.nn.Parameter, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The full tensor from each tp rank's `part`: a weight, gradient or state of `parameter` (all-gather over tp)."""
    partition = partition_of(parameter)
    if partition is None:
        return part
    dim, sizes = partition
    shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
    parts = [part.new_empty(shape) for shape in shapes]
    if len(set(sizes)) == 1:
        dist.all_gather(parts, part.contiguous(), group=group)
    else:
        for rank, other in enumerate(parts):
            other.copy_(part) if rank == dist.get_rank(group) else None
            dist.broadcast(other, group_src=rank, group=group)
    return torch.cat(parts, dim=dim)


def local_part(parameter: torch.nn.Parameter, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """This tp rank's part of a full tensor of `parameter`."""
    partition = partition_of(parameter)
    return full if partition is None else full.split(partition[1], dim=partition[0])[tp_rank]


def place(shard: TensorShard, parameter: torch.nn.Parameter | None, tp_rank: int) -> TensorShard:
    """Turn a shard of this tp rank's part of a parameter into a shard of the whole. Tp rank 0 writes replicas."""
    partition = None if parameter is None else partition_of(parameter)
    if partition is None or shard.key.startswith("step/"):
        return dataclasses.replace(shard, is_written=shard.is_written and tp_rank == 0)
    dim, sizes = partition
    full_shape, offset = list(shard.full_shape), list(shard.offset)
    full_shape[dim], offset[dim] = sum(sizes), sum(sizes[:tp_rank])
    return dataclasses.replace(shard, full_shape=tuple(full_shape), offset=tuple(offset))

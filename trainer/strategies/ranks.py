"""What both strategies say to all ranks in the same words: reductions, rank 0's part, printing.

Each function but `gather_objects` is a method of both classes (`all_reduce = ranks.all_reduce`); all it takes of a
strategy is its meshes and device. A rank that is alone is not asked to communicate: copying a large tensor, gloo's thread
would start OpenMP threads of its own, and with more of those than cores, OpenMP's waiting threads go to sleep at once:
small operations of the whole process then take several times as long.
"""

import builtins
import datetime
import functools
from collections.abc import Callable
from typing import Optional

import torch
import torch.distributed as dist


def all_reduce(strategy, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """All-reduce over the ranks that see different tokens (dp x sp), in place."""
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    group = strategy.meshes.loss.get_group()
    if group.size() > 1:
        dist.all_reduce(tensor, op=ops[op], group=group)
    return tensor


def all_gather(strategy, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of the ranks that see different tokens (dp x sp), in rank order."""
    group = strategy.meshes.loss.get_group()
    if group.size() == 1:
        return [tensor.clone()]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def gather_objects(value, group: Optional[dist.ProcessGroup] = None) -> list:
    """The `value`s of the ranks of `group`, by default of all ranks, in rank order."""
    gathered: list = [None] * dist.get_world_size(group)
    if len(gathered) == 1:
        return [value]
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def max_over_all_ranks(strategy, values: list[float]) -> list[float]:
    """The largest of each value over all ranks."""
    if dist.get_world_size() == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64, device=strategy.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def broadcast_object(strategy, value):
    """Rank 0's `value`, on every rank."""
    box = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def wait_for_all() -> None:
    """A barrier for work that takes rank 0 alone as long as it may: downloads, tokenization, writing. NCCL's watchdog ends
    ranks that wait for ten minutes, gloo those that wait for thirty; theirs are for training, where a hang is one."""
    if dist.get_world_size() > 1:
        dist.barrier(group=make_patient_group(dist.group.WORLD))


@functools.cache
def make_patient_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of `wait_for_all`; its first call is made where all ranks arrive together."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def rank_0_first(strategy, build: Callable):
    """`build()` on rank 0, then on the others, which find what rank 0 left on disk. All ranks wait for rank 0."""
    value = build() if strategy.is_rank_0() else None
    wait_for_all()
    return value if strategy.is_rank_0() else build()


def rank_0_alone(strategy, act: Callable) -> None:
    """`act()` on rank 0 while all others wait."""
    if strategy.is_rank_0():
        act()
    wait_for_all()


def print(strategy, *values) -> None:
    if strategy.is_rank_0():
        builtins.print(*values, flush=True)


def is_rank_0(strategy) -> bool:
    return dist.get_rank() == 0

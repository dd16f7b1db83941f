"""Communication that both strategies share: reductions over the mesh, objects over all ranks, work of rank 0 first.

The first four functions are methods of every strategy, and use only its meshes. The others concern all ranks.
A group of one rank never communicates. gloo's thread would start its own OpenMP threads to copy a large tensor.
If there are more OpenMP threads than cores, waiting threads sleep at once. Small operations of the whole process
then take several times as long.
"""

import builtins
import datetime
import functools
import os
import socket
from collections.abc import Callable
from typing import Optional

import torch
import torch.distributed as dist

from trainer.errors import UserError, plain
from trainer.terminal import fitted

_local_rank: Optional[int] = None  # torchrun's, where LOCAL_RANK holds something else by now
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(strategy, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """All-reduce (sum, max or min) in place over dp x sp, the ranks that see different tokens."""
    group = strategy.meshes.loss.get_group()
    if group.size() > 1:
        dist.all_reduce(tensor, op=OPERATIONS[op], group=group)
    return tensor


def all_gather(strategy, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of the ranks that see different tokens, in rank order (all-gather over dp x sp)."""
    group = strategy.meshes.loss.get_group()
    if group.size() == 1:
        return [tensor.clone()]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def print(strategy, *values) -> None:
    """Print on rank 0 only, each value in lines of its own. Control characters of texts are shown, not sent to the terminal.

    The first value is fitted to the width of the terminal. The others are shown as they are, as texts of the data must be.
    """
    if strategy.is_rank_0():
        texts = [plain(str(value)) for value in values]
        builtins.print(*map(fitted, texts[:1]), *texts[1:], sep="\n", flush=True)


def is_rank_0(strategy) -> bool:
    return dist.get_rank() == 0


def local_rank() -> int:
    """This rank's number on its node, as torchrun gave it."""
    return int(os.environ.get("LOCAL_RANK", 0)) if _local_rank is None else _local_rank


def keep_local_rank() -> None:
    """Read the local rank for good: DeepSpeed needs the number of a GPU in LOCAL_RANK."""
    global _local_rank
    _local_rank = local_rank()


def gather_objects(value, group: Optional[dist.ProcessGroup] = None) -> list:
    """Return the `value` of each rank of `group`, in rank order (all-gather of objects; all ranks by default).

    A process without a process group is one rank.
    """
    gathered: list = [None] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(gathered) == 1:
        return [value]
    # rank 0 may come late: it hashes and writes files meanwhile
    dist.all_gather_object(gathered, value, group=group or make_patient_group(dist.group.WORLD))
    return gathered


def together(action: Callable, where: str, problem: str, allowed: str = "", errors: tuple = (OSError,)) -> list:
    """Run `action()` on all ranks and return their results, in rank order (one all-gather over all ranks).

    If it raises one of `errors` on any rank, every rank raises the same UserError(where, ...): the found value is
    `problem`, such as "cannot be written", with the error and the rank.
    """
    result = found = None
    try:
        result = action()
    except errors as error:
        cause = getattr(error, "strerror", None) or error  # of an OSError, without its number and file
        file = getattr(error, "filename", None)
        found = f"{problem}: {cause}" + (f" ({file})" if file else "")
    outcomes = gather_objects((result, found))
    for rank, (_, found) in enumerate(outcomes):
        if found:
            raise UserError(where, found + f" (on rank {rank})" * (rank > 0), allowed)
    return [result for result, _ in outcomes]


def max_over_all_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each value over the ranks (all-reduce over all ranks, of a small tensor on `device`)."""
    if dist.get_world_size() == 1:
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def broadcast_object(value):
    """Return rank 0's `value` on every rank (broadcast over all ranks)."""
    box = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=make_patient_group(dist.group.WORLD))
    return box[0]


def from_rank_0(look: Callable):
    """Return what `look()` returns on rank 0, on every rank. A UserError of rank 0 is raised by all ranks."""
    found = None
    if dist.get_rank() == 0:
        try:
            found = look()
        except UserError as error:
            found = error
    found = broadcast_object(found)
    if isinstance(found, UserError):
        raise found
    return found


def wait_for_all() -> None:
    """Wait for all ranks, without a short limit (barrier). Rank 0 may download, tokenize or write for a long time.

    NCCL's watchdog ends ranks that wait for ten minutes. gloo ends ranks that wait for thirty. These limits are for
    training, where a long wait means a hang.
    """
    if dist.get_world_size() > 1:
        dist.barrier(group=make_patient_group(dist.group.WORLD))


@functools.cache
def make_patient_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the gloo group of `wait_for_all`. All ranks must make the first call together."""
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


def rank_0_first(build: Callable, in_caches: bool = False):
    """Run `build()` on rank 0, then on the other ranks. They wait for rank 0 and find its files on disk.

    With `in_caches`, `build()` writes only to the caches of datasets, and each node may have its own.
    """
    if dist.get_world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())):
        return _build_by_nodes(build, in_caches)
    first = dist.get_rank() == 0
    value = build() if first else None
    wait_for_all()
    return value if first else build()


def _build_by_nodes(build: Callable, in_caches: bool):
    """Run `build()` on rank 0, then on the first rank of each other node, then on the rest.

    With `in_caches`, nodes that do not see rank 0's caches do not wait for it.
    """
    waits = not in_caches or _sees_caches_of_rank_0()
    is_first = local_rank() == 0
    own_turn = (0 if dist.get_rank() == 0 or not waits else 1) if is_first else 2
    for turn in range(3):
        if turn == own_turn:
            value = build()
        gather_objects(None)
    return value


def _sees_caches_of_rank_0() -> bool:
    """Whether this rank and rank 0 share a folder of caches. Rank 0 writes an empty file there for a moment."""
    import datasets  # heavy, and only runs of several nodes ask for its folder

    folder, name = datasets.config.HF_DATASETS_CACHE, f"rank-0-{os.urandom(8).hex()}"
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, name), "w").close()
    name = gather_objects(name)[0]
    sees = os.path.exists(os.path.join(folder, name))
    gather_objects(None)
    if dist.get_rank() == 0:
        os.remove(os.path.join(folder, name))
    return sees


def check_shared_folder(flag: str, folder: str, file: str) -> None:
    """Raise UserError on all ranks unless each of them sees `file`, which rank 0 has just written in `folder`.

    All ranks call this together. Without a shared folder, a run on many nodes would fail at its first checkpoint.
    """
    sees = os.path.exists(os.path.join(folder, file))
    without = sorted({host for host, seen in gather_objects((socket.gethostname(), sees)) if not seen})
    if without:
        found = f"{folder} is not the same folder on all nodes: {', '.join(without)} cannot see what rank 0 wrote"
        raise UserError(flag, found, "a folder on a file system that all nodes share")


def rank_0_alone(act: Callable) -> None:
    """Run `act()` on rank 0 while all other ranks wait."""
    if dist.get_rank() == 0:
        act()
    wait_for_all()

"""Runs of several nodes: which rank prepares files first. Each node may have caches of its own."""

import os
from collections.abc import Callable

import torch.distributed as dist


def build_by_nodes(build: Callable, in_caches: bool, gather_objects: Callable):
    """Run `build()` on rank 0, then on the first rank of each other node, then on the rest.

    If `build()` writes to the caches of datasets, nodes that do not see rank 0's caches do not wait for it.
    `gather_objects` is that of `collectives`; ranks wait for each other in it.
    """
    waits = not in_caches or _sees_caches_of_rank_0(gather_objects)
    is_first = int(os.environ["LOCAL_RANK"]) == 0
    own_turn = (0 if dist.get_rank() == 0 or not waits else 1) if is_first else 2
    for turn in range(3):
        if turn == own_turn:
            value = build()
        gather_objects(None)
    return value


def _sees_caches_of_rank_0(gather_objects: Callable) -> bool:
    """Whether this rank's folder of caches is that of rank 0, which writes an empty file there for a moment."""
    import datasets

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

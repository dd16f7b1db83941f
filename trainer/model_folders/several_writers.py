"""Several ranks write the files of one new folder: which rank writes which files."""

import os
from typing import Optional

import torch.distributed as dist

from trainer.distributed.collectives import gather_objects, local_rank

WRITERS_PER_NODE = 4  # each holds a tensor in host memory, and a disk is busy with few


def new_mark(folder: str) -> str:
    """Write an empty file by which other ranks know this folder from one of the same name. Returns its name."""
    name = f"writers-{os.urandom(8).hex()}"
    open(os.path.join(folder, name), "w").close()
    return name


def own_part(folder: str, mark: str) -> tuple[Optional[int], int]:
    """(this rank's number among the writers, or None; the number of writers). One all-gather over all ranks.

    The first ranks of each node write, if they see the folder. One rank of each node comes first.
    """
    number = local_rank()
    writes = number < WRITERS_PER_NODE and os.path.exists(os.path.join(folder, mark))
    found = enumerate(gather_objects((number, writes)))
    writers = [rank for _, rank in sorted((local, rank) for rank, (local, writes) in found if writes)]
    own = dist.get_rank() if dist.is_initialized() else 0
    return (writers.index(own) if own in writers else None), len(writers)

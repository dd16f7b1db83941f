"""The cores of the machine: a hint that some stay idle, and the share of a rank whose Adam runs on them."""

import os
from typing import Optional

import torch


def core_hint() -> Optional[str]:
    """Return what `idle_cores` says about this process and its machine."""
    return idle_cores(_num_ranks(), torch.get_num_threads(), _num_cores())


def share_cores() -> None:
    """For Adam in host memory beside a GPU: take this rank's share of the cores if there is one thread, as of torchrun.

    A user who wants another number sets OMP_NUM_THREADS to more than 1.
    """
    if torch.get_num_threads() == 1:
        torch.set_num_threads(max(1, _num_cores() // _num_ranks()))


def _num_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idle_cores(num_ranks: int, num_threads: int, num_cores: int) -> Optional[str]:
    """Return a hint if the ranks use a quarter of the cores or less, as with torchrun's one thread per rank.

    A larger share gives no hint, because half of the cores may be hyperthreads.
    """
    if num_ranks == 1 or 4 * num_ranks * num_threads > num_cores:
        return None
    used = f"{num_ranks} ranks of {num_threads} thread{'s' * (num_threads > 1)} on {num_cores} cores"
    return f"{used}: more threads (OMP_NUM_THREADS in the environment) would be quicker"

"""The hint that cores stay idle. Only runs of several ranks on CPU read it."""

import os
from typing import Optional

import torch


def core_hint() -> Optional[str]:
    """Return what `idle_cores` says about this process and its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return idle_cores(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.get_num_threads(), cores)


def idle_cores(num_ranks: int, num_threads: int, num_cores: int) -> Optional[str]:
    """Return a hint if the ranks use a quarter of the cores or less, as with torchrun's one thread per rank.

    A larger share gives no hint, because half of the cores may be hyperthreads.
    """
    if num_ranks == 1 or 4 * num_ranks * num_threads > num_cores:
        return None
    used = f"{num_ranks} ranks of {num_threads} thread{'s' * (num_threads > 1)} on {num_cores} cores"
    return f"{used}: more threads (OMP_NUM_THREADS in the environment) would be quicker"

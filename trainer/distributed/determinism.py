"""--deterministic on CUDA: kernels that give the same bits in every run.

torch's flash and efficient attention have a deterministic backward pass, but they use it only in strict mode. With
`warn_only`, they add gradients in an order that varies (torch, notes/randomness, "CUDA Scaled Dot Product Attention").
In strict mode torch refuses an operation without a deterministic kernel. `entry.py` turns that into one line.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch

_lock, _inside, _mode = threading.Lock(), [], []  # of without_refusals: who is inside, the mode to restore


def use_deterministic_kernels() -> None:
    """Ask cuBLAS, torch and flash-attn for deterministic kernels. cuBLAS reads its variable at its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it on to flash-attn
    torch.use_deterministic_algorithms(True)
    # otherwise, every torch.empty is filled with NaN, which costs time; nothing here reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def without_refusals() -> Iterator[None]:
    """Leave strict mode for a while: for code of others that does not train, and for what is known to be safe.

    The mode is the process's. Rollouts may run in a thread beside training, so the last one that leaves restores it.
    """
    with _lock:
        if not _inside:
            _mode[:] = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
        _inside.append(None)
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                torch.use_deterministic_algorithms(_mode[0], warn_only=_mode[1])


def row_cumsum(rows: torch.Tensor) -> torch.Tensor:
    """Return the running sums along the last dimension of (rows, columns), with the same bits in every run.

    CUDA adds a single row in an order that varies, and several rows in a fixed order. So a single row gets a twin.
    """
    if not rows.is_cuda:
        return rows.cumsum(-1)
    with without_refusals():
        return torch.cat([rows, rows]).cumsum(-1)[:1] if len(rows) == 1 else rows.cumsum(-1)

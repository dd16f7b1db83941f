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


def use_deterministic_kernels() -> None:
    """Ask cuBLAS, torch and flash-attn for deterministic kernels. cuBLAS reads its variable at its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it on to flash-attn
    torch.use_deterministic_algorithms(True)
    # otherwise, every torch.empty is filled with NaN, which costs time; nothing here reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False


@contextlib.contextmanager
def without_refusals() -> Iterator[None]:
    """Leave strict mode for a while, for code of others that does not train. The mode is the process's: not in a thread."""
    assert threading.current_thread() is threading.main_thread(), "strict mode belongs to the main thread"
    strict, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)

"""The library that multiplies fp32 matrices on CPU. torch calls MKL, which uses AVX-512 only on Intel's processors.
torch also has oneDNN, and calls it for bf16. It uses AVX-512 on AMD's too, and is up to twice as fast there."""

import os

import torch

from trainer.errors import UserError

# Settings of oneDNN and of torch: the number of products whose code is kept, 1024 by default. Each one occupies some
# MiB. So lengths that never repeat would fill one or two GiB.
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CACHED = 32

_in_use = False


def choose_cpu_matmul(choice: str) -> str:
    """Choose auto, mkl or onednn for all later fp32 products of this process. Return the one in use, mkl or onednn.
    This covers layers, their gradients and the head, but not its gradient over chunks. Call it before any product."""
    global _in_use
    for name in CACHES:  # they are read at the first product, also of bf16
        os.environ.setdefault(name, str(CACHED))
    is_there = torch.backends.mkldnn.is_available()
    if choice == "onednn" and not is_there:
        raise UserError("--cpu_matmul", "onednn, but this build of torch does not contain it", "auto, mkl")
    is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    _in_use = choice == "onednn" or (choice == "auto" and is_there and is_avx512 and _is_amd())
    if _in_use:
        from trainer.models.onednn_products import install

        install(is_in_use=lambda: _in_use)
    return chosen()


def chosen() -> str:
    return "onednn" if _in_use else "mkl"


def _is_amd() -> bool:
    try:
        with open("/proc/cpuinfo") as lines:
            return any(line.split() == ["vendor_id", ":", "AuthenticAMD"] for line in lines)
    except OSError:  # not Linux
        return False

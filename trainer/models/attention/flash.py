"""Which flash-attention kernels can run here, from the packages flash-attn 2, 3 and 4 or from torch.

The kernels need fp16 or bf16, a head_dim of at most 256, and a GPU of compute capability 8.0 (Ampere) or newer. torch's
kernel also needs a head_dim that is a multiple of 8. `flash_limits.py` checks the flags.
"""

import functools
import importlib
import importlib.metadata
from typing import Optional

import torch
from torch.nn.attention import activate_flash_attention_impl

from trainer.errors import one_line

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
HOPPER = (9, 0)
# flash-attn-4 installs into the same folder, flash_attn, as flash-attn 2, but it has none of its modules
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}


@functools.cache
def flash_fault(version: int) -> Optional[str]:
    """Return why flash-attn 2 or 3 cannot be used, or None if it can. Only an import shows a build for another torch."""
    try:
        importlib.import_module(MODULES[version])
        return None
    except (ImportError, OSError) as error:
        others = ", ".join(name for other, name in PACKAGES.items() if other != version and _is_installed(name))
        if _is_installed(PACKAGES[version]):
            return f"the installed {PACKAGES[version]} cannot be imported: {one_line(error)}"
        return f"flash-attn {version} is not installed{f', only {others}' if others else ''}"


def use_flash_attention_3(device: torch.device) -> bool:
    """Let torch's own attention call FlashAttention 3. Return False where the GPU or the package does not allow that.

    torch has kernels of FlashAttention 2 only, and calls others if it is told to. Those of FlashAttention 3 are for Hopper.
    Their backward pass is not deterministic in every build and for every head_dim.
    """
    fits = torch.cuda.get_device_capability(device) == HOPPER and flash_fault(3) is None
    if fits:
        activate_flash_attention_impl("FA3")
    return fits


def has_flash_attn() -> bool:
    """Return whether flash-attn 2 can be used."""
    return flash_fault(2) is None


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether GPU kernels compute with `tensor`. Tests replace this, and bring kernels for the CPU."""
    return tensor.is_cuda


def flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the flash kernels of torch and flash-attn 2 can serve (..., head_dim) tensors on CUDA."""
    head_dim = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and head_dim == value.shape[-1]
    return fits and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0 and _is_new_enough(query.device)


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY

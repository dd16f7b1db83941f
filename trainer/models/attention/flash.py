"""Which flash-attention kernels can run here: those of the packages flash-attn 2, 3 and 4, and torch's own.

The limits are those of the kernels: fp16 or bf16, head_dim of at most 256, a GPU of compute capability 8.0 (Ampere) or
newer. torch's kernel also needs a head_dim that is a multiple of 8.
"""

import functools
import importlib
import importlib.metadata
from typing import Optional

import torch

from trainer.errors import UserError
from trainer.metrics import layer_configs

FLAG, OTHERS = "--attn_implementation", "sdpa, eager"
MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
# flash-attn-4 installs into the same folder, flash_attn, as flash-attn 2, but it has none of its modules
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}


@functools.cache
def flash_attn_2_fault() -> Optional[str]:
    """Return why flash-attn 2 cannot be used, or None if it can. Only an import shows a build for another torch."""
    try:
        importlib.import_module("flash_attn.flash_attn_interface")
        return None
    except (ImportError, OSError) as error:
        others = ", ".join(name for version, name in PACKAGES.items() if version != 2 and _is_installed(name))
        if _is_installed(PACKAGES[2]):
            return f"the installed flash-attn cannot be imported: {str(error).splitlines()[0]}"
        return f"flash-attn 2 is not installed{f', only {others}' if others else ''}"


def has_flash_attn() -> bool:
    return flash_attn_2_fault() is None


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether the kernels of a GPU compute with `tensor`. The tests say yes, and bring kernels for the CPU."""
    return tensor.is_cuda


def flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether flash kernels, torch's or those of flash-attn 2, can serve (..., head_dim) tensors on CUDA."""
    head_dim = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and head_dim == value.shape[-1]
    return fits and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0 and _is_new_enough(query.device)


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def validate_flash_attention(param_dtype: str, device: str) -> None:
    """Raise UserError if flash_attention_2 cannot run with these flags on this machine."""
    if param_dtype == "fp32":
        raise UserError(FLAG, "flash_attention_2 with --param_dtype fp32", f"{OTHERS}, or --param_dtype bf16, fp16")
    if fault := flash_attn_2_fault():
        raise UserError(FLAG, f"flash_attention_2 needs flash-attn: pip install -e '.[flash]'; {fault}", OTHERS)
    if device == "cpu" or not torch.cuda.is_available():
        raise UserError(FLAG, "flash_attention_2 without a CUDA device", OTHERS)
    validate_capability(torch.cuda.get_device_capability())


def validate_capability(capability: tuple[int, int]) -> None:
    """Raise UserError for a GPU that is older than flash-attn 2 supports."""
    if capability < MIN_CAPABILITY:
        found = f"flash_attention_2 on a GPU of compute capability {capability[0]}.{capability[1]}; it needs 8.0"
        raise UserError(FLAG, found, OTHERS)


def validate_head_dims(config) -> None:
    """Raise UserError for a transformers config with heads that are too wide for flash-attn 2."""
    for layer in layer_configs(config.get_text_config()):
        heads = getattr(layer, "num_attention_heads", None)  # Mamba has none
        head_dim = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
        if head_dim > MAX_HEAD_DIM:
            found = f"flash_attention_2 with head_dim {head_dim} of {config.model_type}; it ends at {MAX_HEAD_DIM}"
            raise UserError(FLAG, found, OTHERS)

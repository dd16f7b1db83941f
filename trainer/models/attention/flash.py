"""Which flash-attention kernels can run here, from the packages flash-attn 2, 3 and 4 or from torch.

The kernels need fp16 or bf16, a head_dim of at most 256, and a GPU of compute capability 8.0 (Ampere) or newer. torch's
kernel also needs a head_dim that is a multiple of 8. The functions `validate_*` refuse
--attn_implementation flash_attention_2 and flash_attention_3 by this, and --ring_attn_kernel, before the model is read.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Optional

import torch
from torch.nn.attention import activate_flash_attention_impl

from trainer.errors import UserError, one_line
from trainer.metrics import layer_configs

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
HOPPER = (9, 0)
# flash-attn-4 installs into the same folder, flash_attn, as flash-attn 2, but it has none of its modules
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
MODULES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface"}
FLAG, OTHERS = "--attn_implementation", "sdpa, eager"
RING_FLAG, RING_PACKAGE = "--ring_attn_kernel", "ring_flash_attn"  # it calls kernels of flash-attn 2
SOURCES = {
    2: "flash-attn: pip install -e '.[flash]'",
    3: "flash-attn 3, of github.com/Dao-AILab/flash-attention, hopper",
}
BLACKWELL = (10, 0)  # flash-attn 3 has kernels for compute capability 8.x and 9.0 only


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


def validate_flash_attention(attention: str, device: str) -> None:
    """Raise UserError if flash_attention_2 or _3 cannot run on this machine."""
    version = int(attention[-1])
    if fault := flash_fault(version):
        raise UserError(FLAG, f"{attention} needs {SOURCES[version]}; {fault}", OTHERS)
    if device == "cpu" or not torch.cuda.is_available():
        raise UserError(FLAG, f"{attention} without a CUDA device", OTHERS)
    validate_capability(attention, torch.cuda.get_device_capability())


def validate_capability(attention: str, capability: tuple[int, int]) -> None:
    """Raise UserError for a GPU that is older, or for flash-attn 3 newer, than the package supports."""
    found = f"{attention} on a GPU of compute capability {capability[0]}.{capability[1]}"
    if capability < MIN_CAPABILITY:
        raise UserError(FLAG, f"{found}; it needs 8.0", OTHERS)
    if attention == "flash_attention_3" and capability >= BLACKWELL:
        raise UserError(FLAG, f"{found}; it ends at 9.0", f"{OTHERS}, flash_attention_2")


def validate_ring_package(device: torch.device) -> None:
    """Raise UserError if the package of --ring_attn_kernel, flash-attn 2 or a fit GPU is missing."""
    if importlib.util.find_spec(RING_PACKAGE) is None:
        raise UserError(RING_FLAG, f"{RING_PACKAGE} is not installed: pip install -e '.[ring]'", "native")
    if fault := flash_fault(2):
        raise UserError(RING_FLAG, f"{RING_PACKAGE} needs flash-attn: pip install -e '.[ring]'; {fault}", "native")
    if device.type == "cpu":
        raise UserError(RING_FLAG, f"{RING_PACKAGE} without a CUDA device", "native")
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        found = f"{RING_PACKAGE} on a GPU of compute capability {capability[0]}.{capability[1]}"
        raise UserError(RING_FLAG, found, "native")


def validate_head_dims(config, attention: str = "flash_attention_2") -> None:
    """Raise UserError for a transformers config with heads that are too wide for flash-attn."""
    for layer in layer_configs(config.get_text_config()):
        heads = getattr(layer, "num_attention_heads", None)  # Mamba has none
        head_dim = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
        if head_dim > MAX_HEAD_DIM:
            found = f"{attention} with head_dim {head_dim} of {config.model_type}; it ends at {MAX_HEAD_DIM}"
            raise UserError(FLAG, found, OTHERS)

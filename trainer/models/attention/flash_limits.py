"""Refusals of --attn_implementation flash_attention_2 and flash_attention_3, before the model is read."""

import torch

from trainer.errors import UserError
from trainer.metrics import layer_configs
from trainer.models.attention.flash import MAX_HEAD_DIM, MIN_CAPABILITY, flash_fault
from trainer.models.model_loading import model_class

FLAG, OTHERS = "--attn_implementation", "sdpa, eager"
SOURCES = {
    2: "flash-attn: pip install -e '.[flash]'",
    3: "flash-attn 3, of github.com/Dao-AILab/flash-attention, hopper",
}
BLACKWELL = (10, 0)  # flash-attn 3 has kernels for compute capability 8.x and 9.0 only


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


def validate_head_dims(config, attention: str = "flash_attention_2") -> None:
    """Raise UserError for a transformers config with heads that are too wide for flash-attn."""
    for layer in layer_configs(config.get_text_config()):
        heads = getattr(layer, "num_attention_heads", None)  # Mamba has none
        head_dim = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
        if head_dim > MAX_HEAD_DIM:
            found = f"{attention} with head_dim {head_dim} of {config.model_type}; it ends at {MAX_HEAD_DIM}"
            raise UserError(FLAG, found, OTHERS)


def validate_flash_model(config, auto_class, attention: str) -> None:
    """Raise UserError for a model for which transformers would silently use another kernel."""
    kind = model_class(config, auto_class._model_mapping)
    if kind is None:
        return
    compatible = kind._compatible_flash_implementations
    if not kind._supports_flash_attn or (compatible is not None and attention not in compatible):
        raise UserError(FLAG, f"{attention}, which {config.model_type} does not have in transformers", OTHERS)

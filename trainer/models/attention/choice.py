"""Choose the attention function of a run, and check that the model fits it."""

from typing import Optional

from trainer.errors import UserError
from trainer.metrics import layer_configs

PACKED = "sdpa, flash_attention_2, flash_attention_3"


def resolve_attention(
    attn_implementation: str, packed: bool, ring: bool = False, *, param_dtype: str = "bf16", device: str = "auto"
) -> str:
    """Return the name of the attention function that transformers should call. Raises UserError if it cannot be used.

    With `ring`, `setup_attention` replaces it once the process groups exist.
    """
    if ring and attn_implementation in ("eager", "flash_attention_3"):
        found = f"{attn_implementation} with --ring_attn_size"
        raise UserError("--attn_implementation", found, "sdpa, flash_attention_2")
    if attn_implementation.startswith("flash"):
        from trainer.models.attention.flash_limits import validate_flash_attention

        validate_flash_attention(attn_implementation, param_dtype, device)
        return attn_implementation
    if not packed:
        return attn_implementation
    if attn_implementation == "eager":
        raise UserError("--attn_implementation", "eager with --packing_samples", PACKED)
    from trainer.models.attention.varlen import register_varlen_attention

    return register_varlen_attention()


def validate_packed_model(folder: str, trust_remote_code: bool = False, attention: Optional[str] = None) -> None:
    """Raise UserError if packed documents would see each other. `attention` is the function's name, if it is known."""
    from transformers import AutoConfig

    from trainer.models.attention.varlen import NAME, validate_attention_layers, validate_registered_attention

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    validate_attention_layers(config, "--packing_samples", "leave it out")
    if attention == NAME:
        validate_registered_attention(config, "--packing_samples", "leave it out")
    elif attention.startswith("flash") and _has_chunks(config):
        raise UserError("--attn_implementation", f"{attention} for chunked_attention layers", "auto, sdpa")


def _has_chunks(config) -> bool:
    return "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


def validate_model(folder: str, trust_remote_code: bool, attention: str, packed: bool, auto_class) -> None:
    """Raise UserError if the attention function does not fit the model of `folder`, loaded by `auto_class`."""
    if packed:
        validate_packed_model(folder, trust_remote_code, attention)
    if attention.startswith("flash"):
        from transformers import AutoConfig

        from trainer.models.attention.flash_limits import validate_flash_model, validate_head_dims

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        validate_head_dims(config, attention)
        validate_flash_model(config, auto_class, attention)


def setup_attention(
    strategy,
    folder: str,
    attention: str,
    *,
    packed: bool,
    sp_mode: str,
    ring_attn_kernel: str,
    param_dtype: str,
    trust_remote_code: bool,
) -> tuple:
    """Return (name of the attention function, ranks that split each sequence or None).

    `attention` is the name without splitting. `folder` is the model's. The other values are the flags of these names.

    Raises:
        UserError: the model of `folder` or the device does not fit.
    """
    if packed:
        validate_packed_model(folder, trust_remote_code, attention)
    if strategy.sizes.sp == 1:
        return attention, None
    sp_group = strategy.setup_ring_attn()
    from transformers import AutoConfig

    from trainer.models.attention.split_attention import register_ring_attention, validate_split_model

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    validate_split_model(config)
    if ring_attn_kernel != "native":
        from trainer.models.attention import ring_package

        ring_package.validate_machine(param_dtype, strategy.device)
        ring_package.validate_model(config)
        return register_ring_attention(sp_group, "ring_package", packed), sp_group
    if sp_mode == "ulysses":
        validate_heads(config, strategy.sizes.sp, strategy.sizes.tp)
    return register_ring_attention(sp_group, sp_mode, packed), sp_group


def validate_heads(config, sp_size: int, tp_size: int) -> None:
    """Raise UserError unless Ulysses attention can share the heads of every layer over `sp_size` ranks."""
    from trainer.model_parallel.tp_plans import heads_divide
    from trainer.models.attention.ulysses import validate_ulysses

    tp_size = tp_size if heads_divide(config, tp_size) else 1  # otherwise every tp rank computes all heads
    for layer in layer_configs(config.get_text_config()):
        if hasattr(layer, "num_attention_heads"):  # Mamba has none
            validate_ulysses(layer.num_attention_heads // tp_size, sp_size)


def fit_attention(model, is_split: bool) -> None:
    """Let attention of a loaded model know its documents and positions. Raise UserError for unfit split models."""
    from trainer.models.attention.split_attention import validate_split_model
    from trainer.models.layers.model_call import remember_call

    if is_split:
        validate_split_model(model.config)
    remember_call(model)

"""Choose the attention function of a run, register it with transformers, and check that the model fits it."""

from typing import Optional

import torch.distributed as dist
from transformers import AttentionInterface, AutoConfig

from trainer.errors import UserError
from trainer.metrics import layer_configs
from trainer.model_parallel.tp_plans import heads_divide
from trainer.models.attention import ring_package
from trainer.models.attention.attention_call import read_call
from trainer.models.attention.exact_attention import exact_attention
from trainer.models.attention.flash import (
    FLAG,
    OTHERS,
    validate_flash_attention,
    validate_head_dims,
    validate_ring_package,
)
from trainer.models.attention.ring import ring_attention
from trainer.models.attention.ulysses import ulysses_attention, validate_ulysses
from trainer.models.attention.varlen import (
    NAME,
    register_varlen_attention,
    validate_attention_layers,
    validate_registered_attention,
)
from trainer.models.layers.model_call import remember_call
from trainer.models.model_loading import model_class

SPLIT = {"ring": ring_attention, "ulysses": ulysses_attention, "ring_package": ring_package.package_attention}


def resolve_attention(attn_implementation: str, packed: bool, device: str = "auto") -> str:
    """Return the name of the attention function that transformers should call.

    For sequences that are split over ranks, `setup_attention` replaces it once the process groups exist.

    Raises:
        UserError: the function cannot be used on this machine.
    """
    if attn_implementation.startswith("flash"):
        validate_flash_attention(attn_implementation, device)
        return attn_implementation
    return register_varlen_attention() if packed else attn_implementation


def validate_packed_model(folder: str, trust_remote_code: bool, attention: str) -> None:
    """Raise UserError if packed documents would see each other. `attention` is the name of the attention function."""
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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        validate_head_dims(config, attention)
        validate_flash_model(config, auto_class, attention)


def validate_flash_model(config, auto_class, attention: str) -> None:
    """Raise UserError for a model for which transformers would silently use another kernel."""
    kind = model_class(config, auto_class._model_mapping)
    if kind is None:
        return
    compatible = kind._compatible_flash_implementations
    if not kind._supports_flash_attn or (compatible is not None and attention not in compatible):
        raise UserError(FLAG, f"{attention}, which {config.model_type} does not have in transformers", OTHERS)


def setup_attention(
    strategy,
    folder: str,
    attention: str,
    *,
    packed: bool,
    sp_mode: str,
    ring_attn_kernel: str,
    trust_remote_code: bool,
    exact: bool = False,
    rolls_out: bool = False,
) -> tuple[str, Optional[dist.ProcessGroup]]:
    """Return (name of the attention function, ranks that split each sequence or None).

    `attention` is the name without splitting. With `exact`, a run that `rolls_out` has attention over fixed blocks. `folder` is the model's. The other values are the flags of these names.

    Raises:
        UserError: the model of `folder` or the device does not fit.
    """
    if packed:
        validate_packed_model(folder, trust_remote_code, attention)
    if strategy.sizes.sp == 1 and exact and rolls_out:
        AttentionInterface.register("whole", exact_attention("whole", strategy.exact.split, by_blocks=True))
        return "whole", None
    if strategy.sizes.sp == 1:
        return attention, None
    sp_group = strategy.setup_ring_attn()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    validate_split_model(config)
    if ring_attn_kernel != "native":
        validate_ring_package(strategy.device)
        ring_package.validate_model(config)
        return register_ring_attention(sp_group, "ring_package", packed), sp_group
    if sp_mode == "ulysses":
        validate_heads(config, strategy.sizes.sp, strategy.sizes.tp)
    if exact:
        AttentionInterface.register(sp_mode, exact_attention(sp_mode, strategy.exact.split, by_blocks=rolls_out))
        return sp_mode, sp_group
    return register_ring_attention(sp_group, sp_mode, packed), sp_group


def register_ring_attention(group: dist.ProcessGroup, mode: str, packed: bool = False) -> str:
    """Register attention over `group` with transformers. Return its name, for use as `attn_implementation`.

    Mode "ring" passes keys and values around, for any number of heads. Mode "ulysses" exchanges heads for tokens. Mode
    "ring_package" is the ring of ring-flash-attn; transformers would load a kernel for a name with "flash". All map
    zigzag shards: query (rows, heads, tokens / sp, head_dim) to out (rows, tokens / sp, heads, head_dim). A model call
    has `cu_seqlens` of the whole row if documents are `packed`. It never has an attention mask.
    """
    attention = SPLIT[mode]

    def forward(module, query, key, value, attention_mask=None, **kwargs):
        call = read_call(module, query, attention_mask, kwargs, "--ring_attn_size", "1", packed)
        bounds = call.bounds(query.shape[2] * group.size())
        return attention(call.query, key, value, bounds, call.window, call.scale, group, call.softcap, call.sinks), None

    AttentionInterface.register(mode, forward)
    return mode


def validate_split_model(config) -> None:
    """Raise UserError for a transformers config whose layers would silently compute wrong results from a shard."""
    validate_attention_layers(config, "--ring_attn_size", "1")
    validate_registered_attention(config, "--ring_attn_size", "1")


def validate_heads(config, sp_size: int, tp_size: int) -> None:
    """Raise UserError unless Ulysses attention can divide the heads of every layer over `sp_size` ranks."""
    tp_size = tp_size if heads_divide(config, tp_size) else 1  # otherwise every tp rank computes all heads
    for layer in layer_configs(config.get_text_config()):
        if hasattr(layer, "num_attention_heads"):  # Mamba has none
            validate_ulysses(layer.num_attention_heads // tp_size, sp_size)


def fit_attention(model, is_split: bool) -> None:
    """Give attention of a loaded model access to its documents and positions, in place.

    Raises:
        UserError: sequences are split, and the model does not fit.
    """
    if is_split:
        validate_split_model(model.config)
    remember_call(model)

"""Attention over packed documents, registered through transformers' AttentionInterface.

A packed row holds several documents. `cu_seqlens` (documents + 1,) says where each one begins and ends. Attention never
crosses documents, and no (tokens x tokens) mask is built.
"""

import itertools
import math
from typing import Optional

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.errors import UserError
from trainer.models.attention.flash import flash_fits

NAME = "varlen"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of some models that attention here does not support
# the attributes in which configs name the kinds of their layers, and the kinds that this attention can serve
LAYER_NAMES = ("layer_types", "layers_block_type", "block_types")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    cu_seqlens_host: Optional[torch.Tensor] = None,
    max_length_q: Optional[int] = None,
    sliding_window: Optional[int] = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document of a packed row. Inputs are (1, heads, tokens, head_dim).

    Returns (1, tokens, heads, head_dim), as transformers expects. Raises UserError for a model that does not pass all
    that this needs, see `validate_call`.
    """
    others = {"attention_mask": attention_mask, **{name: kwargs.get(name) for name in UNSUPPORTED}}
    validate_call(module, "--packing_samples", "leave it out", cu_seqlens, sliding_window, others)
    if _has_kernel(query, value, max_length_q, kwargs.get("dropout")):
        return _varlen_kernel(query, key, value, cu_seqlens, max_length_q, sliding_window, kwargs.get("scaling")), None
    outputs = []
    for start, end in itertools.pairwise(document_bounds(cu_seqlens_host)):
        document = (tensor[:, :, start:end] for tensor in (query, key, value))
        mask = _window_mask(end - start, sliding_window, query.device)
        outputs.append(sdpa_attention_forward(module, *document, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


@torch.compiler.disable  # otherwise every new list of bounds would be compiled again
def document_bounds(cu_seqlens_host: torch.Tensor) -> list[int]:
    """Return where each document of a packed row begins, and where the last one ends."""
    return cu_seqlens_host.tolist()


def _has_kernel(query: torch.Tensor, value: torch.Tensor, max_length: Optional[int], dropout: Optional[float]) -> bool:
    """Return whether torch's own kernel for packed attention can run. NOT tested: no GPU was available."""
    return query.is_cuda and flash_fits(query, value) and max_length is not None and not dropout


def _varlen_kernel(query, key, value, cu_seqlens, max_length: int, window: Optional[int], scale: Optional[float]):
    from torch.nn.attention.varlen import varlen_attn

    tokens_first = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1  # the kernel does not count the query itself
    ends = (cu_seqlens, cu_seqlens, max_length, max_length)
    return varlen_attn(*tokens_first, *ends, scale=scale, window_size=(left, 0), enable_gqa=True)[None]


def validate_attention_layers(config, flag: str, allowed: str) -> None:
    """Raise UserError for a transformers config with layers that never call a registered attention function.

    Chunked, linear and state-space layers would see other documents, or only this rank's part of a sequence.
    """
    text = config.get_text_config()
    layers = {layer for name in LAYER_NAMES for layer in getattr(text, name, None) or ()}
    for found in sorted(layers - ATTENTION_LAYERS):
        raise UserError(flag, f"{config.model_type} has layers of {found}", allowed)


def validate_registered_attention(config, flag: str, allowed: str) -> None:
    """Raise UserError for a transformers config whose model does not fit a registered attention function.

    Such a model calls no registered function, or needs more than causal attention within a window."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        raise UserError(flag, f"{config.model_type} with attn_logit_softcapping", allowed)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # remote code: only a call can show whether it fits
        return
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = found[0] if isinstance(found, tuple) else found
    # Models without sdpa have attention with more inputs than query, key and value: sinks, position biases. The other
    # refused models have attention code in the layer itself. That code sees neither documents nor shards.
    if not (model_class._supports_sdpa and model_class._can_set_attn_implementation()):
        raise UserError(flag, f"{config.model_type} has its own kind of attention", allowed)


def validate_call(module, flag: str, allowed: str, cu_seqlens, window, others: dict, packed: bool = True) -> None:
    """Raise UserError if a model does not pass documents and window to attention, or uses one of `others` (not None).

    Attention functions call this. `module` is the module of the layer."""
    config = getattr(module, "config", None)
    name = getattr(config, "model_type", type(module).__name__)
    if packed and cu_seqlens is None:
        raise UserError("--packing_samples", f"{name} does not pass cu_seqlens to its attention", "leave it out")
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) is not False
    # a window as wide as the longest text of the model cuts nothing
    has_window = has_window and config.sliding_window < getattr(config, "max_position_embeddings", math.inf)
    if window is None and has_window and not getattr(config, "layer_types", None):
        raise UserError(flag, f"{name} does not pass its sliding window to its attention", allowed)
    for what, given in others.items():
        if given is not None:
            raise UserError(flag, f"{name} has attention with {what}", allowed)


def _window_mask(length: int, window: Optional[int], device: torch.device) -> Optional[torch.Tensor]:
    """Return the (1, 1, length, length) boolean mask of a causal sliding window. None: plain causal is the same."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return ((distance >= 0) & (distance < window))[None, None]


def register_varlen_attention() -> str:
    """Register `attn_implementation="varlen"` with transformers. Return that name."""
    AttentionInterface.register(NAME, varlen_attention_forward)
    return NAME

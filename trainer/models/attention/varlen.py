"""Attention over packed documents, registered through transformers' AttentionInterface.

A packed row holds several documents. `cu_seqlens` (documents + 1,) holds the bounds of the documents. Attention never
crosses documents, and no (tokens x tokens) mask is built.
"""

import itertools
from typing import Optional

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.datasets.batches.global_batches import copied
from trainer.errors import UserError
from trainer.models.attention.attention_call import CHUNKED_MODELS, AttentionCall, read_call
from trainer.models.attention.flash import flash_fits, on_gpu
from trainer.models.attention.ring import ring_attention
from trainer.models.layers.recurrent_layers import known_layers
from trainer.models.model_loading import model_class

NAME = "varlen"
# the attributes in which configs name the kinds of their layers, and the kinds that this attention can serve
LAYER_NAMES = ("layer_types", "layers_block_type", "block_types")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# transformers has no sdpa for them because of their sinks; their attention needs nothing else
MODELS_WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"}


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each document of a packed row. Inputs are (1, heads, tokens, head_dim).

    Returns (1, tokens, heads, head_dim), as transformers expects. Raises UserError for a call that this attention
    cannot serve, see `read_call`.
    """
    call = read_call(module, query, attention_mask, kwargs, "--packing_samples", "leave it out", packed=True)
    if call.softcap is not None or call.sinks is not None:
        bounds = call.bounds(query.shape[2])
        return ring_attention(
            call.query, key, value, bounds, call.window, call.scale, None, call.softcap, call.sinks
        ), None
    if _has_kernel(call, value):
        return _varlen_kernel(call, key, value), None
    outputs = []
    for start, end in itertools.pairwise(call.bounds(query.shape[2])):
        document = (tensor[:, :, start:end] for tensor in (call.query, key, value))
        mask = _window_mask(end - start, call.window, query.device)
        outputs.append(sdpa_attention_forward(module, *document, mask, scaling=call.scale, is_causal=True)[0])
    return torch.cat(outputs, dim=1), None


def _has_kernel(call: AttentionCall, value: torch.Tensor) -> bool:
    """Return whether torch's own kernel for packed attention can run."""
    return on_gpu(call.query) and flash_fits(call.query, value) and call.max_length is not None


def _varlen_kernel(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tokens_first = (tensor[0].transpose(0, 1) for tensor in (call.query, key, value))
    left = -1 if call.window is None else call.window - 1  # the kernel does not count the query itself
    cu_seqlens, max_length = call.cu_seqlens, call.max_length
    if call.chunk is not None:
        bounds = call.bounds(call.query.shape[2])
        cu_seqlens = copied(torch.tensor(bounds, dtype=torch.int32), call.query.device)
        max_length = min(max_length, call.chunk)
    ends = (cu_seqlens, cu_seqlens, max_length, max_length)
    return varlen_attn(*tokens_first, *ends, scale=call.scale, window_size=(left, 0), enable_gqa=True)[None]


def validate_attention_layers(config, flag: str, allowed: str) -> None:
    """Raise UserError for a transformers config with layers that would see other documents, or only a part of a sequence.

    Such layers never call a registered attention function, and `recurrent_layers` does not support them either.
    """
    text = config.get_text_config()
    layers = {layer for name in LAYER_NAMES for layer in getattr(text, name, None) or ()} - ATTENTION_LAYERS
    if layers:
        layers -= known_layers(config)
    for found in sorted(layers):
        raise UserError(flag, f"{config.model_type} has layers of {found}", allowed)


def validate_registered_attention(config, flag: str, allowed: str) -> None:
    """Raise UserError for a transformers config whose model does not fit a registered attention function.

    Such a model calls no registered function, or needs more than causal attention within a window.
    """
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ()
    if "chunked_attention" in layers and text.model_type not in CHUNKED_MODELS:
        raise UserError(flag, f"{config.model_type} has layers of chunked_attention", allowed)
    if layers and set(layers) == {"linear_attention"}:  # no attention; `validate_attention_layers` has checked them
        return
    kind = model_class(config, MODEL_FOR_CAUSAL_LM_MAPPING)
    if kind is None:  # only a call can show whether it fits
        return
    # Other models without sdpa have inputs that attention here does not support. Models whose implementation cannot be
    # set have attention code in the layer itself. That code sees neither documents nor shards.
    fits = kind._supports_sdpa or text.model_type in MODELS_WITH_SINKS
    if not (fits and kind._can_set_attn_implementation()):
        raise UserError(flag, f"{config.model_type} has its own kind of attention", allowed)


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


def no_search_for_packed_rows() -> None:
    """Switch off, for this process, transformers' search for packed rows in position ids.

    It waits for the GPU, and `cu_seqlens` name the documents of a row.
    """
    masking_utils.find_packed_sequence_indices = {}.get  # finds no tensor in {}, which means: no packed rows

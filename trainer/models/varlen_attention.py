"""Attention over packed documents, registered through transformers' AttentionInterface.

A packed row holds several documents; `cu_seqlens` (documents + 1,) says where each begins and ends. No attention crosses
a document, and no (tokens x tokens) mask is built.
"""

import itertools
from typing import Optional

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.errors import UserError

NAME = "varlen"


def varlen_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_length_q: Optional[int] = None,
    sliding_window: Optional[int] = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document of a packed row; query, key, value: (1, heads, tokens, head_dim).

    Without `cu_seqlens` the row is one document. Returns (1, tokens, heads, head_dim), as transformers expects.
    """
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise NotImplementedError(
                f"packed attention does not support {unsupported}; train without --packing_samples"
            )
    if _has_kernel(query, cu_seqlens, max_length_q, kwargs.get("dropout")):
        return _varlen_kernel(query, key, value, cu_seqlens, max_length_q, sliding_window, kwargs.get("scaling")), None
    bounds = [0, query.shape[2]] if cu_seqlens is None else document_bounds(cu_seqlens)
    outputs = []
    for start, end in itertools.pairwise(bounds):
        document = (tensor[:, :, start:end] for tensor in (query, key, value))
        mask = _window_mask(end - start, sliding_window, query.device)
        outputs.append(sdpa_attention_forward(module, *document, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


@torch.compiler.disable
def document_bounds(cu_seqlens: torch.Tensor) -> list[int]:
    """`cu_seqlens` on the host. Every layer gets the same tensor, so a GPU is asked, and waited for, once a micro-batch."""
    if not hasattr(cu_seqlens, "on_host"):
        cu_seqlens.on_host = cu_seqlens.tolist()
    return cu_seqlens.on_host


def _has_kernel(query: torch.Tensor, cu_seqlens, max_length: Optional[int], dropout: Optional[float]) -> bool:
    """Whether torch's own kernel of packed attention can run. NOT tested: no GPU was at hand."""
    fits = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return fits and cu_seqlens is not None and max_length is not None and not dropout


def _varlen_kernel(query, key, value, cu_seqlens, max_length: int, window: Optional[int], scale: Optional[float]):
    from torch.nn.attention.varlen import varlen_attn

    tokens_first = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    left = -1 if window is None else window - 1  # the kernel does not count the query itself
    ends = (cu_seqlens, cu_seqlens, max_length, max_length)
    return varlen_attn(*tokens_first, *ends, scale=scale, window_size=(left, 0), enable_gqa=True)[None]


def validate_attention_layers(config, flag: str, allowed: str) -> None:
    """Raises UserError for a transformers config with layers that never come to a registered attention function.

    Chunked, linear and state-space layers would see across documents, or only this rank's part of a sequence.
    """
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    for found in sorted(layers - {"full_attention", "sliding_attention"}):
        raise UserError(flag, f"{config.model_type} has layers of {found}", allowed)


def _window_mask(length: int, window: Optional[int], device: torch.device) -> Optional[torch.Tensor]:
    """(1, 1, length, length) boolean mask of a causal sliding window; None where plain causal attention is the same."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return ((distance >= 0) & (distance < window))[None, None]


def register_varlen_attention() -> str:
    """Make `attn_implementation="varlen"` known to transformers; returns that name."""
    AttentionInterface.register(NAME, varlen_attention_forward)
    return NAME

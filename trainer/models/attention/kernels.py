"""Attention of one block of queries over one block of keys. The log-sum-exp lets blocks be merged.

`block_forward` and `block_backward` select the kernel. On CPU it is torch's own flash kernel, which also serves
scaled_dot_product_attention. The three CUDA kernels are flash-attn (if installed) and torch's flash and efficient
attention. The tests run their calls on CPU, with kernels that check arguments as upstream does.

Shapes: query, out, dout (batch, heads, q_tokens, head_dim); key, value (batch, kv_heads, k_tokens, head_dim), where
kv_heads divides heads; lse (batch, heads, q_tokens) in fp32. `causal` needs as many queries as keys. `mask` is an
additive mask (1, 1, q_tokens, k_tokens) in the query's dtype. Every query must see some key in it. With `softcap`, scores
become softcap * tanh(scores / softcap) before the mask: only flash-attn has that, so other blocks use soft_cap.py.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from trainer.models.attention.flash import flash_fits, has_flash_attn, on_gpu
from trainer.models.attention.soft_cap import capped_backward, capped_forward

aten = torch.ops.aten
LSE_ALIGNMENT = 32  # efficient attention pads the rows of its log-sum-exp to a multiple of this many queries
BIAS_ALIGNMENT = 8  # efficient attention needs rows of the mask to begin at multiples of this many elements


def block_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: Optional[torch.Tensor],
    softcap: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): out = softmax(scale * query key^T + mask) value, in fp32 or the query's dtype.

    lse is the logarithm of the softmax denominators.
    """
    if softcap is not None and not _capped_by_flash_attn(query, value, mask):
        return capped_forward(query, key, value, scale, causal, mask, softcap)
    if not on_gpu(query):
        query, key, value, mask = _in_fp32(query, key, value, mask)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    if mask is not None or not flash_fits(query, value):
        return _efficient_forward(query, key, value, scale, causal, mask)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (batch, tokens, heads, head_dim)
    if has_flash_attn():
        from flash_attn.flash_attn_interface import _flash_attn_forward  # an optional package

        out, lse, *_ = _flash_attn_forward(
            query, key, value, dropout_p=0.0, softmax_scale=scale, causal=causal,
            window_size_left=-1, window_size_right=-1, softcap=softcap or 0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
    else:
        lengths = query.shape[1], key.shape[1]
        out, lse, *_ = aten._flash_attention_forward(
            query, key, value, None, None, *lengths, 0.0, causal, False, scale=scale
        )
    return out.transpose(1, 2), lse


def block_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
    mask: Optional[torch.Tensor],
    softcap: Optional[float] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dquery, dkey, dvalue) that this block of keys adds, given `out` and `lse` over all keys of the row.

    P = exp(scale * query key^T + mask - lse) is the share of these keys in the whole softmax. With this P, the
    gradients of separate blocks simply add up (Dao et al. 2022, FlashAttention, algorithm 4).
    """
    if softcap is not None and not _capped_by_flash_attn(query, value, mask):
        return capped_backward(dout, query, key, value, out, lse, scale, causal, mask, softcap)
    if not on_gpu(query):
        dout, query, key, value, out, mask = _in_fp32(dout, query, key, value, out, mask)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    if mask is not None or not flash_fits(query, value):
        return _efficient_backward(dout, query, key, value, out, lse, scale, causal, mask)
    dout, query, key, value, out = (tensor.transpose(1, 2) for tensor in (dout, query, key, value, out))
    block = dout, query, key, value, out, lse.contiguous(), scale, causal
    grads = _flash_attn_backward(*block, softcap) if has_flash_attn() else _torch_flash_backward(*block)
    return tuple(grad.transpose(1, 2) for grad in grads)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Make head_dim contiguous. The CPU kernel ignores its stride and would silently give wrong results."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _in_fp32(*tensors: Optional[torch.Tensor]) -> list[Optional[torch.Tensor]]:
    """Convert one block to fp32, but not from fp64. Partial results are then not rounded, and the CPU is faster than in bf16."""
    return [tensor if tensor is None or tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]


def _capped_by_flash_attn(query: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor]) -> bool:
    return on_gpu(query) and mask is None and flash_fits(query, value) and has_flash_attn()


def _flash_attn_backward(dout, query, key, value, out, lse, scale, causal, softcap):
    from flash_attn.flash_attn_interface import _flash_attn_backward as backward  # an optional package

    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    backward(
        dout.contiguous(), query, key, value, out, lse, *grads, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=softcap or 0.0, alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return grads


def _torch_flash_backward(dout, query, key, value, out, lse, scale, causal):
    lengths = query.shape[1], key.shape[1]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state, not read without dropout
    return aten._flash_attention_backward(
        dout, query, key, value, out, lse, None, None, *lengths, 0.0, causal, no_dropout, no_dropout, scale=scale
    )


def _efficient_forward(query, key, value, scale, causal, mask):
    key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    bias = _aligned_bias(mask, query)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scale)
    return out, lse[..., : query.shape[2]]


def _efficient_backward(dout, query, key, value, out, lse, scale, causal, mask):
    num_kv_heads = key.shape[1]
    key, value = (_repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf"))  # exp(x - inf) = 0 after the last query
    no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
    dquery, dkey, dvalue, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, query, key, value, _aligned_bias(mask, query), out, lse, no_dropout, no_dropout, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    dkey, dvalue = (grad.unflatten(1, (num_kv_heads, -1)).sum(2) for grad in (dkey, dvalue))
    return dquery, dkey, dvalue


def _repeat_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


def _aligned_bias(mask: Optional[torch.Tensor], query: torch.Tensor) -> Optional[torch.Tensor]:
    """Expand the mask to (batch, heads, q_tokens, k_tokens), with rows aligned as efficient attention needs them."""
    if mask is None:
        return None
    num_keys = mask.shape[-1]
    padded = F.pad(mask, (0, -num_keys % BIAS_ALIGNMENT))
    return padded[..., :num_keys].expand(*query.shape[:2], -1, -1)

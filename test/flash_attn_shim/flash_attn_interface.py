"""flash-attn 3 for tests on CPU: upstream's functions and arguments (hopper/flash_attn_interface.py), in fp32 inside.

The checks and the mathematics are those of flash-attn 2 in this folder; the limits of the two are the same. The forward
pass is an operation of torch, as upstream, so that selective recomputation can find it.
"""

from typing import Optional

import torch
from flash_attn import flash_attn_interface as flash_2
from flash_attn.flash_attn_interface import _require


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=(), device_types="cpu")
def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor],
    cu_seqlens_k: Optional[torch.Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = 0.0, softmax_scale, causal, window_size_left, window_size_right, softcap, None, False
    if cu_seqlens_q is None:
        return flash_2._flash_attn_forward(q, k, v, *options)[:2]
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_2._flash_attn_varlen_forward(q, k, v, *ends, *options)[:2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ends, options, deterministic):
        out, lse = _flash_attn_forward(q, k, v, *ends, *options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ends, ctx.options, ctx.deterministic = ends, options, deterministic
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        is_varlen = ctx.ends[0] is not None
        kernel = flash_2._flash_attn_varlen_backward if is_varlen else flash_2._flash_attn_backward
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        ends = ctx.ends if is_varlen else ()
        kernel(dout, q, k, v, out, lse, *grads, *ends, 0.0, *ctx.options, None, ctx.deterministic)
        return *grads, None, None, None


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    unused = qv, q_descale, k_descale, v_descale, pack_gqa, attention_chunk or None, sm_margin or None
    return _attend(q, k, v, (None,) * 4, unused, softmax_scale, causal, window_size, softcap, deterministic)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    unused = seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa, attention_chunk or None
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _attend(q, k, v, ends, unused, softmax_scale, causal, window_size, softcap, deterministic)


def flash_attn_with_kvcache(*_, **__):
    raise AssertionError("training has no cache")


def _attend(q, k, v, ends, unused, scale, causal, window, softcap, deterministic):
    _require(all(value is None for value in unused), "options that no test uses")
    options = scale or q.shape[-1] ** -0.5, causal, *window, softcap
    return _Attention.apply(q, k, v, ends, options, deterministic)

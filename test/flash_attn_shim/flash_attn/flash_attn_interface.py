"""The functions of flash-attn 2.8 with upstream's signatures and checks (csrc/flash_attn/flash_api.cpp), on CPU.

Shapes: query and out (rows, q_tokens, heads, head_dim); key and value (rows, k_tokens, kv_heads, head_dim); lse (rows,
heads, q_tokens) in fp32. In the varlen functions, rows and tokens are one dimension, and lse is (heads, q_tokens). With
`causal` and fewer queries than keys, the last query sees the last key.

`allow_wide` lets fp32 and fp64 tensors pass, for comparisons that rounding would hide. `calls` lists every call of a kernel.
"""

from typing import NamedTuple, Optional

import torch

allow_wide = False


class Call(NamedTuple):
    kernel: str
    dtype: torch.dtype
    causal: bool
    window: tuple[int, int]


calls: list[Call] = []


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("forward", (q, k, v), 4, dropout_p, causal, (window_size_left, window_size_right), alibi_slopes)
    _require(k.shape == v.shape and k.shape[0] == q.shape[0] > 0, "shapes of query, key and value")
    out, lse = _forward(q, k, v, softmax_scale, causal, (window_size_left, window_size_right), softcap)
    return out.to(q.dtype), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    _check("backward", (q, k, v), 4, dropout_p, causal, (window_size_left, window_size_right), alibi_slopes)
    _check_backward((q, k, v, q, q), (dq, dk, dv, out, dout), softmax_lse, (q.shape[0], q.shape[2], q.shape[1]))
    _require(type(deterministic) is bool, "deterministic")
    window = window_size_left, window_size_right
    grads = _backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window, softcap)
    for place, grad in zip((dq, dk, dv), grads):
        place.copy_(grad)
    return torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    window = window_size_left, window_size_right
    _check("varlen forward", (q, k, v), 3, dropout_p, causal, window, alibi_slopes)
    _check_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _require(block_table is None and leftpad_k is None and seqused_k is None, "a paged cache in training")
    out = torch.zeros_like(q, dtype=torch.float32)
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=torch.float32)
    for queries, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        part = _forward(q[None, queries], k[None, keys], v[None, keys], softmax_scale, causal, window, softcap)
        out[queries], lse[:, queries] = part[0][0], part[1][0]
    return out.to(q.dtype), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    window = window_size_left, window_size_right
    _check("varlen backward", (q, k, v), 3, dropout_p, causal, window, alibi_slopes)
    _check_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check_backward((q, k, v, q, q), (dq, dk, dv, out, dout), softmax_lse, (q.shape[1], q.shape[0]))
    _require(type(deterministic) is bool, "deterministic")
    for grad in (dq, dk, dv):
        grad.zero_()  # as upstream, for tokens of no document
    for queries, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        inputs = dout[None, queries], q[None, queries], k[None, keys], v[None, keys], out[None, queries]
        grads = _backward(*inputs, softmax_lse[None, :, queries], softmax_scale, causal, window, softcap)
        dq[queries], dk[keys], dv[keys] = (grad[0] for grad in grads)
    return torch.zeros(q.shape[1], q.shape[0])


class _Attention(torch.autograd.Function):
    """Both public functions. `ends` are the four arguments of a varlen call, or nothing."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, window, softcap, deterministic, *ends):
        _require(q.shape[-1] % 8 == 0, "no padding of head_dim in this test")
        ctx.options = scale or q.shape[-1] ** -0.5, causal, *window, softcap, None
        kernel = _flash_attn_varlen_forward if ends else _flash_attn_forward
        out, lse, *_ = kernel(q, k, v, *ends, 0.0, *ctx.options, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ends, ctx.deterministic = ends, deterministic
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        kernel = _flash_attn_varlen_backward if ctx.ends else _flash_attn_backward
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        kernel(dout, q, k, v, out, lse, *grads, *ctx.ends, 0.0, *ctx.options, ctx.deterministic)
        return *grads, *[None] * (5 + len(ctx.ends))


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    _require(not dropout_p and alibi_slopes is None and not return_attn_probs, "options that no test uses")
    return _Attention.apply(q, k, v, softmax_scale, causal, window_size, softcap, deterministic)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    _require(not dropout_p and alibi_slopes is None and not return_attn_probs, "options that no test uses")
    _require(block_table is None, "a paged cache in training")
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _Attention.apply(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, *ends)


def flash_attn_with_kvcache(*_, **__):
    raise AssertionError("training has no cache")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"flash-attn: {what}")


def _check(kernel, qkv, dims: int, dropout_p, causal, window, alibi_slopes) -> None:
    """The checks of mha_fwd, mha_varlen_fwd, mha_bwd and mha_varlen_bwd that query, key and value have in common."""
    q, k, _ = qkv
    half = (torch.float16, torch.bfloat16)
    _require(
        q.dtype in half or (allow_wide and q.dtype in (torch.float32, torch.float64)),
        "only support fp16 and bf16 data type",
    )
    for tensor in qkv:
        _require(tensor.dtype == q.dtype, "query, key and value must have the same dtype")
        _require(tensor.device == q.device, "tensors on different devices")
        _require(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        _require(tensor.dim() == dims and tensor.shape[-1] == q.shape[-1], "shape")
    _require(q.shape[-1] <= 256, "head dimension at most 256")
    _require(q.shape[-1] % 8 == 0, "head_size that is a multiple of 8")
    _require(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    _require(type(causal) is bool and all(type(side) is int for side in window), "types of causal and window")
    _require(dropout_p == 0.0 and alibi_slopes is None, "dropout or alibi, which this test does not have")
    calls.append(Call(kernel, q.dtype, causal, tuple(window)))


def _check_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    _require(k.shape == v.shape, "shapes of key and value")
    _require(cu_seqlens_q.shape == cu_seqlens_k.shape, "cu_seqlens of different lengths")
    for ends, tensor, longest in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
        _require(ends.dtype == torch.int32, "cu_seqlens must have dtype int32")
        _require(ends.is_contiguous() and ends.device == q.device, "cu_seqlens")
        _require(type(longest) is int, "max_seqlen must be an int: a tensor would wait for the GPU")
        # not checked by the kernel: it would read beyond the tensor, or leave out tokens
        _require(int(ends[0]) == 0 and int(ends[-1]) == len(tensor), "cu_seqlens that do not cover the row")
        _require(longest >= int(ends.diff().max()), "a document is longer than max_seqlen")


def _check_backward(likes, tensors, lse: torch.Tensor, lse_shape: tuple) -> None:
    for like, tensor in zip(likes, tensors):
        _require(tensor.dtype == like.dtype and tensor.shape == like.shape, "a gradient unlike its tensor")
        _require(tensor.stride(-1) == 1, "gradients must have contiguous last dimension")
    _require(lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == lse_shape, "softmax_lse")


def _documents(cu_seqlens_q, cu_seqlens_k):
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [(slice(*q[n : n + 2]), slice(*k[n : n + 2])) for n in range(len(q) - 1)]


def _scores(q, k, scale: float, causal: bool, window, softcap: float) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Return fp32 scores (rows, heads, q_tokens, k_tokens), and tanh of the scores if there is a soft cap."""
    query, key = (tensor.float().transpose(1, 2) for tensor in (q, k))
    scores = scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    tanh = (scores / softcap).tanh() if softcap else None
    scores = scores if tanh is None else softcap * tanh
    num_queries, num_keys = scores.shape[-2:]
    distance = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, float("-inf")), tanh


def _forward(q, k, v, scale, causal, window, softcap) -> tuple[torch.Tensor, torch.Tensor]:
    scores, _ = _scores(q, k, scale, causal, window, softcap)
    lse = scores.logsumexp(-1)
    share = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a query without keys: out 0, lse inf
    value = v.float().transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return (share @ value).transpose(1, 2), lse


def _backward(dout, q, k, v, out, lse, scale, causal, window, softcap) -> list[torch.Tensor]:
    """Dao et al. 2022, FlashAttention, algorithm 4. `out` and `lse` may be those of more keys than these."""
    repeats = q.shape[2] // k.shape[2]
    scores, tanh = _scores(q, k, scale, causal, window, softcap)
    share = (scores - lse[..., None]).exp()
    dout, query, key, value, out = (tensor.float().transpose(1, 2) for tensor in (dout, q, k, v, out))
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    dscores = share * (dout @ value.mT - (dout * out).sum(-1, keepdim=True))
    if tanh is not None:
        dscores = dscores * (1 - tanh.square())
    dquery, dkey, dvalue = scale * dscores @ key, scale * dscores.mT @ query, share.mT @ dout
    dkey, dvalue = (grad.unflatten(1, (-1, repeats)).sum(2) for grad in (dkey, dvalue))
    return [grad.transpose(1, 2) for grad in (dquery, dkey, dvalue)]

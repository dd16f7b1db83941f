"""torch's flash and efficient attention of CUDA, for CPU: the checks of upstream's C++, and the same mathematics in fp32.

`register` adds them to torch's own operators, so a call passes torch's schema first. The checks are those of
aten/src/ATen/native/transformers/cuda/attention.cu, attention_backward.cu and flash_attn/flash_api.cpp.
"""

import torch
from flash_attn import flash_attn_interface as flash

ALIGN_LSE, ALIGN_BIAS = 32, 8  # queries; elements of a half-precision mask


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert seqused_k is None and alibi_slopes is None and block_table is None and not return_debug_mask
    window = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    options = dropout_p, scale or query.shape[-1] ** -0.5, is_causal, *window, 0.0, None, False
    if cum_seq_q is None:
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
        out, lse, *_ = flash._flash_attn_forward(query, key, value, *options)
    else:
        out, lse, *_ = flash._flash_attn_varlen_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *options)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert rng_state.dtype == torch.uint64
    window = [-1 if side is None else side for side in (window_size_left, window_size_right)]
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    options = dropout_p, scale or query.shape[-1] ** -0.5, is_causal, *window, 0.0, None, False
    inputs = grad_out.contiguous(), query, key, value, out.contiguous(), logsumexp
    if cum_seq_q is None:
        flash._flash_attn_backward(*inputs, *grads, *options)
    else:
        flash._flash_attn_varlen_backward(*inputs, *grads, cum_seq_q, cum_seq_k, max_q, max_k, *options)
    return tuple(grads)


def efficient_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    _check_efficient(query, key, value, attn_bias, dropout_p)
    assert compute_log_sumexp
    scores = _scores(query, key, attn_bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % ALIGN_LSE), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64)
    return out, padded, seed, seed.clone()


def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    _check_efficient(query, key, value, attn_bias, dropout_p)
    assert grad_out_.dtype == out.dtype == query.dtype and grad_out_.shape == out.shape == query.shape
    rows = -(-query.shape[2] // ALIGN_LSE) * ALIGN_LSE
    assert logsumexp.dtype == torch.float32 and logsumexp.shape == (*query.shape[:2], rows)
    assert logsumexp.stride(-1) == 1 and list(grad_input_mask) == [True, True, True, False]
    share = (_scores(query, key, attn_bias, is_causal, scale) - logsumexp[..., : query.shape[2], None]).exp()
    dout, q, k, v, out = (tensor.float() for tensor in (grad_out_, query, key, value, out))
    dscores = share * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * (scale or query.shape[-1] ** -0.5)
    grads = dscores @ k, dscores.mT @ q, share.mT @ dout
    return *(grad.to(query.dtype) for grad in grads), query.new_empty(0)


def _check_efficient(query, key, value, attn_bias, dropout_p) -> None:
    assert dropout_p == 0.0
    for tensor in (query, key, value):
        assert tensor.dim() == 4 and tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype == query.dtype
        assert tensor.shape[:2] == query.shape[:2], "this kernel has no grouped heads"
        assert tensor.shape[-1] * tensor.element_size() % 4 == 0, "rows must be aligned"
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:3], key.shape[2]) and attn_bias.dtype == query.dtype
        assert attn_bias.stride(-1) == 1 and attn_bias.stride(-2) % ALIGN_BIAS == 0, (
            "attn_bias is not correctly aligned"
        )


def _scores(query, key, bias, is_causal, scale) -> torch.Tensor:
    scores = (scale or query.shape[-1] ** -0.5) * query.float() @ key.float().mT
    scores = scores if bias is None else scores + bias.float()
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # is_causal counts from the upper left corner
    return scores.masked_fill(above, float("-inf")) if is_causal else scores


def register() -> torch.library.Library:
    """Give torch's operators these kernels on CPU for as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (
        ("_flash_attention_forward", flash_forward),
        ("_flash_attention_backward", flash_backward),
        ("_scaled_dot_product_efficient_attention", efficient_forward),
        ("_scaled_dot_product_efficient_attention_backward", efficient_backward),
    ):
        library.impl(name, kernel, "CPU")
    return library

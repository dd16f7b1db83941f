"""The ring's blocks and torch's attention with FlashAttention 3, whose kernels are formulas here.

    test/fake_gpu/run.sh flash_3.py

torch's own code around these kernels is real: what replaces which operator, its checks, and the order of arguments.
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch
import values
from torch.nn.attention import _fa3

from trainer.models.attention import flash
from trainer.models.attention.kernels import block_backward, block_forward

CARD, CALLS = torch.device("cuda", 0), []


def attention(query, key, value, scale, causal):
    """(batch, tokens, heads, head_dim) in fp64 on the CPU: out, and lse (batch, heads, tokens)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = scale * query @ key.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def doubled(*tensors):
    return [tensor.detach().cpu().double() for tensor in tensors]


def forward(q, k, v, *rest):
    scale, causal = next((a, b) for a, b in pairwise(rest) if isinstance(a, float) and isinstance(b, bool))
    CALLS.append("forward")
    out, lse = attention(*doubled(q, k, v), scale, causal)
    return out.to(q.dtype).to(CARD), lse.float().to(CARD), None, None


def backward(dout, q, k, v, out, lse, dq, dk, dv, *rest):
    """The gradients of this block, given `out` and `lse` over all keys (Dao et al. 2022, algorithm 4)."""
    scale, causal = next((a, b) for a, b in pairwise(rest) if isinstance(a, float) and isinstance(b, bool))
    CALLS.append("backward")
    dout, q, k, v, out, lse = doubled(dout, q, k, v, out, lse)
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = (tensor.repeat_interleave(groups, 2) for tensor in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, wide_k)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    share = (scores - lse[..., None]).exp()
    inner = torch.einsum("bqhd,bkhd->bhqk", dout, wide_v) - (dout * out).sum(-1).transpose(1, 2)[..., None]
    change = scale * share * inner
    grads = (
        torch.einsum("bhqk,bkhd->bqhd", change, wide_k),
        torch.einsum("bhqk,bqhd->bkhd", change, q).unflatten(2, (-1, groups)).sum(3),
        torch.einsum("bhqk,bqhd->bkhd", share, dout).unflatten(2, (-1, groups)).sum(3),
    )
    for target, grad in zip((dq, dk, dv), grads):
        target.copy_(grad.to(target.dtype))


def main():
    values.install()
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor query) -> Tensor")
    sys.modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
    assert flash.use_flash_attention_3(CARD)
    _fa3._FA3_CUDA_FWD, _fa3._FA3_CUDA_BWD = forward, backward
    torch.manual_seed(0)
    shapes = (2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)
    query, key, value, dout = (torch.randn(shape).bfloat16() for shape in (*shapes, shapes[0]))
    for causal in (True, False):
        expected = block_forward(query, key, value, 0.25, causal, None)
        wanted = block_backward(dout, query, key, value, *expected, 0.25, causal, None)
        on_card = [tensor.to(CARD) for tensor in (dout, query, key, value)]
        found = block_forward(*on_card[1:], 0.25, causal, None)
        grads = block_backward(*on_card, *found, 0.25, causal, None)
        for one, other in zip((*found, *grads), (*expected, *wanted)):
            assert torch.allclose(one.cpu().float(), other.float(), rtol=2e-2, atol=2e-2)
    inputs = [tensor.to(CARD).requires_grad_() for tensor in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.25, enable_gqa=True)
    out.backward(dout.to(CARD))
    print("forward", CALLS.count("forward"), "backward", CALLS.count("backward"))


if __name__ == "__main__":
    main()

"""The attention kernels of a GPU against the formula in fp64. The tests are skipped without a GPU."""

import pytest
import torch

from trainer.models.attention.kernels import block_backward, block_forward
from trainer.models.attention.varlen import varlen_attention_forward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 64, 0.125


def inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    options = {"generator": generator, "device": "cuda", "dtype": dtype}
    shapes = [(1, heads, num_tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [
        torch.randn(shape, **options).requires_grad_() for shape in shapes
    ]  # query, key, value, gradient of the output


def formula(query, key, value, visible: torch.Tensor) -> torch.Tensor:
    """Compute attention of (1, heads, tokens, head_dim) in fp64. `visible` (tokens, tokens) says which pairs count."""
    key, value = (tensor.double().repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    scores = (SCALE * query.double() @ key.mT).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value


def assert_close(found, expected, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_attention(dtype, window):
    ends = torch.tensor([0, 7, 8, 30], dtype=torch.int32, device="cuda")
    query, key, value, dout = inputs(30, dtype)
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS
    out, _ = varlen_attention_forward(
        module,
        query,
        key,
        value,
        None,
        cu_seqlens=ends,
        cu_seqlens_host=ends.cpu(),
        max_length_q=22,
        sliding_window=window,
        scaling=SCALE,
    )
    place = torch.arange(30, device="cuda")
    document = torch.bucketize(place, ends[1:].long(), right=True)
    distance = place[:, None] - place[None]
    visible = (document[:, None] == document[None]) & (distance >= 0) & (distance < (window or 30))
    expected = formula(query, key, value, visible)
    assert_close([out.transpose(1, 2)], [expected], dtype)
    leaves = (query, key, value)
    found = torch.autograd.grad(out.transpose(1, 2), leaves, dout)
    assert_close(found, torch.autograd.grad(expected, leaves, dout.double()), dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_ring_attention(dtype, causal, masked):
    if causal and masked:
        pytest.skip("a mask already says what is visible")
    query, key, value, dout = inputs(40, dtype)
    visible = torch.ones(40, 40, dtype=torch.bool, device="cuda")
    visible = visible.tril(3 if masked else 0) if causal or masked else visible
    mask = torch.zeros(1, 1, 40, 40, device="cuda", dtype=dtype).masked_fill(~visible, float("-inf"))
    expected = formula(query, key, value, visible)
    with torch.no_grad():
        out, lse = block_forward(query, key, value, SCALE, causal, mask if masked else None)
        options = (out, lse, SCALE, causal, mask if masked else None)
        grads = block_backward(dout, query, key, value, *options)
    assert_close([out], [expected], dtype)
    assert_close(grads, torch.autograd.grad(expected, (query, key, value), dout.double()), dtype)

"""The calls of a GPU's attention kernels against the formula in fp64.

Without a GPU, kernels on CPU take their place. They check arguments as upstream does: flash_attn_shim, torch_kernels.py.
"""

import sys

import pytest
import torch
from launch import ROOT

from trainer.models.attention import flash, kernels, varlen
from trainer.models.attention.kernels import block_backward, block_forward
from trainer.models.attention.varlen import varlen_attention_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 64, 0.125


def forget_kernels() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "torch_kernels")]:
        del sys.modules[name]


@pytest.fixture(autouse=True, params=["torch", "flash-attn"])
def kernel_calls(request, monkeypatch):
    """With and without flash-attn 2. On CPU, the calls that arrived at a flash kernel."""
    calls = None
    flash.flash_fault.cache_clear()
    if DEVICE == "cpu":
        forget_kernels()
        monkeypatch.syspath_prepend(str(ROOT / "test/flash_attn_shim"))
        import torch_kernels

        library = torch_kernels.register()
        calls = torch_kernels.flash.calls
        for module in (kernels, varlen):
            monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(flash, "_is_new_enough", lambda device: True)
    elif request.param == "flash-attn" and not flash.has_flash_attn():
        pytest.skip("flash-attn 2 is not installed")
    monkeypatch.setattr(kernels, "has_flash_attn", lambda: request.param == "flash-attn")
    yield calls
    flash.flash_fault.cache_clear()
    if DEVICE == "cpu":
        library._destroy()
        forget_kernels()  # or other tests of this process would find flash-attn installed


def arrived(calls, dtype: torch.dtype) -> None:
    """Only half precision comes to a flash kernel, and all of it does. On a GPU, `calls` is None."""
    if calls is not None:
        assert len(calls) == (0 if dtype == torch.float32 else 2)
        assert {call.dtype for call in calls} <= {dtype}


def inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(7)
    options = {"generator": generator, "device": DEVICE, "dtype": dtype}
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
def test_packed_attention(kernel_calls, dtype, window):
    ends = torch.tensor([0, 7, 8, 30], dtype=torch.int32, device=DEVICE)
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
    place = torch.arange(30, device=DEVICE)
    document = torch.bucketize(place, ends[1:].long(), right=True)
    distance = place[:, None] - place[None]
    visible = (document[:, None] == document[None]) & (distance >= 0) & (distance < (window or 30))
    expected = formula(query, key, value, visible)
    assert_close([out.transpose(1, 2)], [expected], dtype)
    leaves = (query, key, value)
    found = torch.autograd.grad(out.transpose(1, 2), leaves, dout)
    assert_close(found, torch.autograd.grad(expected, leaves, dout.double()), dtype)
    arrived(kernel_calls, dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_ring_attention(kernel_calls, dtype, causal, masked):
    if causal and masked:
        pytest.skip("a mask already says what is visible")
    query, key, value, dout = inputs(40, dtype)
    visible = torch.ones(40, 40, dtype=torch.bool, device=DEVICE)
    visible = visible.tril(3 if masked else 0) if causal or masked else visible
    mask = torch.zeros(1, 1, 40, 40, device=DEVICE, dtype=dtype).masked_fill(~visible, float("-inf"))
    expected = formula(query, key, value, visible)
    with torch.no_grad():
        out, lse = block_forward(query, key, value, SCALE, causal, mask if masked else None)
        options = (out, lse, SCALE, causal, mask if masked else None)
        grads = block_backward(dout, query, key, value, *options)
    assert_close([out], [expected], dtype)
    assert_close(grads, torch.autograd.grad(expected, (query, key, value), dout.double()), dtype)
    arrived(kernel_calls, torch.float32 if masked else dtype)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_of_a_split_row_add_up(kernel_calls, softcap):
    """37 queries see 40 keys in two blocks. The second block is causal. The row is that of one softmax."""
    query, key, value, dout = inputs(40, torch.bfloat16)
    query, dout = query[:, :, 3:].detach(), dout[:, :, 3:]
    whole, parts = [], []
    visible = torch.ones(37, 40, dtype=torch.bool, device=DEVICE).tril(3)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    scores = SCALE * leaves[0] @ leaves[1].repeat_interleave(HEADS // KV_HEADS, 1).mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible, float("-inf"))
    expected = scores.softmax(-1) @ leaves[2].repeat_interleave(HEADS // KV_HEADS, 1)
    blocks = [(slice(0, 3), False), (slice(3, 40), True)]
    with torch.no_grad():
        for keys, causal in blocks:
            parts.append(tuple(block_forward(query, key[:, :, keys], value[:, :, keys], SCALE, causal, None, softcap)))
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(part.double() * (part_lse - lse).exp()[..., None] for part, part_lse in parts).to(query.dtype)
        for keys, causal in blocks:
            block = query, key[:, :, keys], value[:, :, keys], out, lse
            whole.append(block_backward(dout, *block, SCALE, causal, None, softcap))
    grads = whole[0][0].double() + whole[1][0], *(torch.cat(pair, 2) for pair in list(zip(*whole))[1:])
    assert_close([out, *grads], [expected, *torch.autograd.grad(expected, leaves, dout.double())], torch.bfloat16)


def test_blocks_are_deterministic_in_strict_mode(kernel_calls, monkeypatch):
    if kernel_calls is None or not kernels.has_flash_attn():
        pytest.skip("flash-attn gets a flag; torch's kernel looks at the mode itself")
    from flash_attn import flash_attn_interface

    given, backward = [], flash_attn_interface._flash_attn_backward

    def noted(*args, deterministic, **options):
        given.append(deterministic)
        return backward(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(flash_attn_interface, "_flash_attn_backward", noted)
    query, key, value, dout = (tensor.detach() for tensor in inputs(8, torch.bfloat16))
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        try:
            out, lse = block_forward(query, key, value, SCALE, True, None)
            block_backward(dout, query, key, value, out, lse, SCALE, True, None)
        finally:
            torch.use_deterministic_algorithms(False)
    assert given == [False, True]

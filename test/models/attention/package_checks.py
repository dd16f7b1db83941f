"""Checks of the ring of the package ring-flash-attn on CPU, run by test_ring_package.py: `torchrun package_checks.py`.

Its own Python runs over gloo. flash-attn comes from test/flash_attn_shim, which checks every argument and computes in
fp32. The tensors are fp64, because the package adds up gradients in place if they are fp32 already: on a GPU they are
never fp32, and ours come out wrong then.
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from flash_attn import flash_attn_interface
from ring_checks import (
    SMALL,
    WORST,
    alone,
    compare,
    expect_refusal,
    make_samples,
    outputs_and_gradients,
    plain_attention,
    run,
    split,
    split_attention,
    zigzag_shards,
)
from transformers import LlamaConfig, Qwen3Config

from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.entry import end_well
from trainer.models.attention.ring_package import package_attention

CASES = (  # lengths of the documents of a row, rows, heads, KV heads, head_dim
    ([64], 1, 4, 4, 8),
    ([48], 3, 4, 2, 16),
    ([7, 1, 30, 26], 1, 4, 1, 8),
    ([1] * 9 + [90, 21], 1, 6, 3, 24),
    ([120, 120], 1, 2, 2, 8),
)


def draw(lengths, rows, heads, kv_heads, head_dim, dtype) -> tuple[list[torch.Tensor], list[int]]:
    """Return query, key, value and the gradient of the output of the whole row, and the bounds of its documents."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    tokens = -(-sum(lengths) // (2 * dist.get_world_size())) * 2 * dist.get_world_size()
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    bounds += [tokens] * (bounds[-1] < tokens)
    shapes = [(rows, count, tokens, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes], bounds


def check_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Outputs and gradients are those of plain attention in fp64 and of our own ring. Only half precision arrives."""
    flash_attn_interface.allow_wide = dtype == torch.float64
    flash_attn_interface.calls.clear()
    for case in CASES:
        tensors, bounds = draw(*case, dtype)
        options = bounds, None, 0.3
        plain = outputs_and_gradients(
            lambda *qkv, options=options: plain_attention(*qkv, *options), *(t.double() for t in tensors)
        )
        packed = len(bounds) > 2
        found = split_attention("ring_package", *tensors, *options, packed)
        compare(f"package {dtype} against plain", found, zigzag_shards(plain), tolerance, case)
        compare(
            f"package {dtype} against ours", found, split_attention("ring", *tensors, *options, packed), tolerance, case
        )
    kernels = {call.kernel for call in flash_attn_interface.calls}
    assert kernels == {"forward", "backward", "varlen forward", "varlen backward"}, kernels
    assert {call.dtype for call in flash_attn_interface.calls} == {dtype}


def check_models() -> None:
    """Loss and gradients of whole models equal those of one process, also when activations are recomputed."""
    flash_attn_interface.allow_wide = True
    torch.set_default_dtype(torch.float64)
    samples = make_samples()
    for config in (LlamaConfig(**SMALL), Qwen3Config(**SMALL, tie_word_embeddings=True)):
        loss, count, gradients = alone(config, samples)
        for collate, recompute in ((collate_packed, True), (collate_packed, False), (collate_padded, False)):
            found = split(config, collate(samples, 0), "ring_package", recompute)
            assert found[1] == count and abs(found[0] / loss - 1) <= 1e-6, (found[0], loss)
            for name, gradient in gradients.items():
                off = ((found[2][name] - gradient).norm() / gradient.norm()).item()
                WORST["package model gradient"] = max(WORST.get("package model gradient", 0.0), off)
                assert off <= 1e-5, f"{config.model_type} {collate.__name__}: {name} is off by {off:.1e}"


def check_refusals() -> None:
    """What the package would ignore is refused before any communication."""
    (query, key, value, _), bounds = draw([64], 1, 4, 2, 8, torch.float32)
    call = (query, key, value, bounds)
    expect_refusal("--ring_attn_kernel", package_attention, *call, 7, 0.3, dist.group.WORLD)
    expect_refusal("--ring_attn_kernel", package_attention, *call, None, 0.3, dist.group.WORLD, softcap=30.0)
    expect_refusal("--ring_attn_kernel", package_attention, *call, None, 0.3, dist.group.WORLD, sinks=torch.zeros(4))
    narrow = [tensor[..., :6] for tensor in (query, key, value)]
    expect_refusal("--ring_attn_kernel", package_attention, *narrow, bounds, None, 0.3, dist.group.WORLD)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    run("fp64", check_attention, torch.float64, 1e-5)
    run("bf16", check_attention, torch.bfloat16, 1e-2)
    if dist.get_world_size() == 2:
        run("models", check_models)
    run("refusals", check_refusals)
    if dist.get_rank() == 0:
        for what, worst in sorted(WORST.items()):
            print(f"worst {what}: {worst:.2e}")
    end_well()

"""Run kernels of fla and Liger by Triton's interpreter on a CPU, forward and backward, against formulas in plain torch.

    python interpreted.py

It needs torch with Triton, and fla and liger-kernel, without a GPU. Prints JSON: {kernel: [largest difference of the outputs, of
the gradients]}, both relative to the larger of 1 and the formula's largest value.
"""

import builtins
import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined

import torch
import torch.nn.functional as F
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import GridExecutor


def let_the_interpreter_run_them() -> None:
    """Take one configuration of autotuning. Give the ints of `range`, and float arguments, the method `to` of scalars."""
    init, call = Autotuner.__init__, GridExecutor.__call__

    def with_one_config(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.configs = self.configs[:1]

    class Int(int):
        def to(self, dtype, **kwargs):
            return self

    class Float(float):
        def to(self, dtype, **kwargs):
            return self

    def number(value):
        return int(value.handle.data.item()) if isinstance(value, tl.tensor) else getattr(value, "value", value)

    def kernel_range(*bounds):
        return map(Int, builtins.range(*map(number, bounds)))

    def with_scalars(self, *args, **kwargs):
        self.fn.__globals__.setdefault("range", kernel_range)
        args = [Float(a) if type(a) is float else a for a in args]
        return call(self, *args, **{key: Float(a) if type(a) is float else a for key, a in kwargs.items()})

    libdevice.rsqrt = lambda x: tl.math.rsqrt(
        x
    )  # functions of libdevice have no body; the one of tl is replaced at a call
    Autotuner.__init__, GridExecutor.__call__ = with_one_config, with_scalars


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in zip(found, expected, strict=True))


def compared(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> list[float]:
    """[difference of the outputs, of the gradients of a random weighted sum]"""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    # the formula first: some kernels write gradients into what they saved
    options = {"inputs": inputs, "retain_graph": True}  # the two graphs may share their first nodes
    right, own = (torch.autograd.grad((out * weights).sum(), **options) for out in (expected, found))
    return [difference([found], [expected]), difference(own, right)]


def inputs(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def rms_norm() -> list[float]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight = inputs((6, 48), (48,))
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    return compared(LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False), expected, [x, weight])


def rope() -> list[float]:
    from liger_kernel.ops.rope import LigerRopeFunction

    query, key = inputs((1, 4, 10, 16), (1, 2, 10, 16))
    angles = torch.outer(torch.arange(10.0), 10000 ** (-torch.arange(0, 16, 2) / 16)).repeat(1, 2)[None]
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    found = torch.cat(LigerRopeFunction.apply(query.clone(), key.clone(), cos, sin), 1)  # it writes into its inputs
    return compared(found, torch.cat([rotated(query), rotated(key)], 1), [query, key])


def swiglu() -> list[float]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = inputs((5, 40), (5, 40))
    return compared(LigerSiLUMulFunction.apply(gate, up), F.silu(gate) * up, [gate, up])


def linear_cross_entropy() -> list[float]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, weight = inputs((9, 24), (70, 24))
    labels = torch.arange(9) * 7
    labels[2] = -100
    found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
    found = found[0] if isinstance(found, tuple) else found
    return compared(found, F.cross_entropy(hidden @ weight.T, labels), [hidden, weight])


BOUNDS = ((0, 30), (30, 80))  # of the documents in a packed row


def delta_rule(query, key, value, decay, beta) -> torch.Tensor:
    """Token by token: S = exp(decay) S, then S += beta k (v - S k); out = S q (Yang et al. 2024, Gated Delta Networks)."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state, out = query.new_zeros(*query.shape[::2], query.shape[-1], value.shape[-1]), []
    for t in range(query.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        change = (value[:, t] - (state * key[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * change[:, :, None]
        out.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1)


def gated_delta_rule() -> list[float]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key, value, decay, beta = inputs(*[(1, 80, 1, 16)] * 3, (1, 80, 1), (1, 80, 1))
    gates = [-decay.abs(), beta.sigmoid()]
    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor([0, *(end for _, end in BOUNDS)])}
    found, _ = chunk_gated_delta_rule(query, key, value, g=gates[0], beta=gates[1], **options)
    rows = [[x[:, start:end] for x in (query, key, value, *gates)] for start, end in BOUNDS]
    return compared(found, torch.cat([delta_rule(*row) for row in rows], 1), [query, key, value, decay, beta])


def convolution() -> list[float]:
    from fla.modules.convolution import causal_conv1d

    x, weight = inputs((1, 80, 16), (16, 4))
    bounds = torch.tensor([0, *(end for _, end in BOUNDS)])
    found = causal_conv1d(x, weight, None, activation="silu", cu_seqlens=bounds)
    found = found[0] if isinstance(found, tuple) else found
    rows = [F.pad(x[:, start:end].transpose(1, 2), (3, 0)) for start, end in BOUNDS]
    expected = torch.cat([F.silu(F.conv1d(row, weight[:, None], groups=16)).transpose(1, 2) for row in rows], 1)
    return compared(found, expected, [x, weight])


KERNELS = (rms_norm, rope, swiglu, linear_cross_entropy, gated_delta_rule, convolution)

if __name__ == "__main__":
    let_the_interpreter_run_them()
    print(json.dumps({kernel.__name__: kernel() for kernel in KERNELS}))

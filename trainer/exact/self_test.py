"""The test at the start of an --exact run: do products and attention give the same bits on every layout of this machine?

A sample has the same shapes on every layout. What may differ is where its tensors lie in memory, and the processor of a
rank. Neither may change a bit.
"""

import hashlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from trainer.distributed.collectives import gather_objects
from trainer.distributed.processor import fixed_kernels
from trainer.errors import UserError
from trainer.exact.block_attention import block_attention
from trainer.exact.exact_products import ROWS

PRODUCTS = (
    (1, 64, 96),
    (3, 64, 96),
    (37, 96, 200),
    (300, 256, 256),
)  # tokens, columns in and out; the last is oneDNN's
NO_ROLLOUTS = "Remove the flag: rollouts need this."
ATTENTION = ((5, 4, 16), (130, 4, 64))  # tokens, heads, columns of a head


def ask_for_fixed_kernels() -> None:
    """Take one thread, and MKL's kernels that do not depend on the place in memory. Call it before a process's first product.

    MKL's Conditional Numerical Reproducibility. Without it, small products on AMD's processors fail the test below. On Intel's
    processors, only its strict mode gives a row the same bits at any number of rows. With two threads, MKL splits rows at
    other places for other numbers of rows, and some small products get other bits.
    """
    os.environ.setdefault("MKL_CBWR", fixed_kernels())
    torch.set_num_threads(1)


def self_test(splits_rows: bool = False, decodes: bool = False, library: str = "mkl") -> None:
    """Raise UserError if the kernels in use lack a property that --exact needs (collective, well under a second).

    With `splits_rows`, ranks compute products of some rows of a sample each. An engine `decodes` single tokens.
    `library` makes the products, mkl or onednn.
    """
    plain = dict(_results(_aligned))
    _compare(plain, dict(_results(_aligned)), "from one call to the next", "Remove the flag.")
    _compare(plain, dict(_results(_shifted)), "with the place in memory", _if_moved(library))
    if splits_rows:
        _compare_rows(NO_ROLLOUTS if decodes else "Set --ring_attn_size to 1.")
    if decodes:
        _compare_decoding()
    for rank, other in enumerate(gather_objects(plain)):
        _compare(plain, other, f"between this rank and rank {rank}", "Take ranks with processors of one kind.")


def _if_moved(library: str) -> str:
    """What to do if the place in memory changes a result of `library`, mkl or onednn."""
    kernels = os.environ.get("MKL_CBWR")
    if library == "onednn":
        return "Take --cpu_matmul mkl."
    return "Remove the flag." if kernels == fixed_kernels() else f"Unset MKL_CBWR, which is {kernels}."


def _compare(plain: dict[str, str], other: dict[str, str], how: str, instead: str) -> None:
    for name, digest in plain.items():
        if other[name] != digest:
            raise UserError("--exact", f"{name} changes on this machine {how}", instead=instead)


def _compare_rows(instead: str) -> None:
    for _, inner, outer in PRODUCTS:
        generator = torch.Generator().manual_seed(0)
        rows, weight = (torch.randn(shape, generator=generator) for shape in ((8 * ROWS, inner), (outer, inner)))
        for factor in (weight, weight.T.contiguous().T):  # as in forward, and as in backward
            parts = [F.linear(part, factor) for part in rows.split([ROWS, 5 * ROWS, 2 * ROWS])]
            if not torch.equal(F.linear(rows, factor), torch.cat(parts)):
                found = f"a product with {inner} x {outer} changes on this machine with the number of rows"
                raise UserError("--exact", found, instead=instead)


def _compare_decoding() -> None:
    """Does a token have the same bits alone as in its sample: in attention, and in functions of vector code?"""
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(70)[None]
    for heads, columns in ((2, 8), (4, 64)):
        query = torch.randn(1, 2 * heads, 70, columns, generator=generator)
        key, value = (torch.randn(1, heads, 70, columns, generator=generator) for _ in range(2))
        whole = block_attention(query, key, value, tokens, columns**-0.5)
        for at in (0, 31, 32, 69):
            here = tokens[:, at : at + 1]
            alone = block_attention(
                query[:, :, at : at + 1], key[:, :, : at + 1], value[:, :, : at + 1], here, columns**-0.5
            )
            if not torch.equal(alone, whole[:, :, at : at + 1]):
                raise UserError(
                    "--exact", "attention of one token has other bits than in its sample", instead=NO_ROLLOUTS
                )
    values = torch.rand(37, 12, generator=generator) * 30
    for function in (torch.sin, torch.cos, torch.exp, torch.log):
        if not torch.equal(function(values)[5:6], function(values[5:6].contiguous())):
            found = f"{function.__name__} of one token has other bits than in its sample"
            raise UserError("--exact", found, instead=NO_ROLLOUTS)


def _aligned(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).requires_grad_()


def _shifted(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The same values, four bytes after the start of their memory, as in the flat buffers of a backend."""
    values = torch.randn(shape, generator=generator)
    memory = torch.empty(values.numel() + 1)
    return memory[1:].view(shape).copy_(values).requires_grad_()


def _results(make: Callable) -> Iterator[tuple[str, str]]:
    """(name, hash of the result and of all its gradients) of each operation, on tensors from `make`."""
    for tokens, inner, outer in PRODUCTS:
        generator = torch.Generator().manual_seed(0)
        inputs = [make(shape, generator) for shape in ((tokens, inner), (outer, inner), (outer,))]
        yield f"a product of {tokens} x {inner} and {inner} x {outer}", _digest(F.linear(*inputs), inputs)
    for tokens, heads, columns in ATTENTION:
        generator = torch.Generator().manual_seed(0)
        inputs = [make((1, heads, tokens, columns), generator) for _ in range(3)]
        found = F.scaled_dot_product_attention(*inputs, is_causal=True)
        yield f"attention over {tokens} tokens", _digest(found, inputs)
    inputs = [make((37, 200), torch.Generator().manual_seed(0))]
    yield "log_softmax", _digest(F.log_softmax(inputs[0], -1), inputs)


def _digest(result: torch.Tensor, inputs: list[torch.Tensor]) -> str:
    seed = torch.linspace(-1, 1, result.numel()).view(result.shape)
    tensors = [result.detach(), *torch.autograd.grad(result, inputs, seed)]
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()

"""The test at the start of an --exact run: do products and attention give the same bits on every layout of this machine?

A sample has the same shapes on every layout. What may differ is where its tensors lie in memory, and the processor of a
rank. Neither may change a bit.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from trainer.distributed.collectives import gather_objects
from trainer.distributed.processor import fixed_kernels
from trainer.errors import UserError
from trainer.exact.block_attention import block_attention
from trainer.exact.exact_products import ALIGNED, ROWS
from trainer.exact.fixed_tree import num_pieces
from trainer.metrics import layer_configs

PRODUCTS = (
    (1, 64, 96),
    (3, 64, 96),
    (37, 96, 200),
    (300, 256, 256),
)  # tokens, columns in and out; the last is oneDNN's
NO_ROLLOUTS = "Remove the flag: rollouts need this."
NO_RING = "Set --ring_attn_size to 1."
ATTENTION = ((5, 4, 4, 16, None), (130, 4, 4, 64, None))  # tokens, heads, KV heads, columns of a head, window
DECODED = ((4, 2, 8, None), (8, 4, 64, None))  # heads, KV heads, columns of a head, window
OWN_TOKENS = 3 * ROWS  # of a product with the shape of a model
OWN_KEYS = 70  # tokens of its attention
OWN_WEIGHTS = 2**22  # elements of a factor: more take too long


@dataclass(frozen=True)
class Shapes:
    """The products of a model, (columns in, columns out), and its attention: (heads, KV heads, columns of a head, window)."""

    products: tuple[tuple[int, int], ...]
    attention: tuple[tuple[int, int, int, Optional[int]], ...]


def shapes_of(model: torch.nn.Module, kinds: dict[str, str]) -> Shapes:
    """The shapes that `model` computes with. `kinds` are those of `fix_products`: one piece is tested, as all are alike.

    A product with very many columns out has fewer here, by a multiple of ALIGNED. So its last columns are as they are.
    """
    found = set()
    for name, module in model.named_modules():
        inner, outer = (getattr(module, key, None) for key in ("in_features", "out_features"))
        if inner is None and hasattr(module, "nf"):  # Conv1D of GPT-2
            inner, outer = module.nx, module.nf
        if not (isinstance(inner, int) and isinstance(outer, int) and inner and outer):
            continue
        kind = kinds.get(name)
        outer //= num_pieces(outer, 1) if kind in ("columns", "vocabulary") else 1
        inner //= num_pieces(inner, 1) if kind == "rows" else 1
        surplus = max(0, outer - max(OWN_WEIGHTS // inner, 2 * ALIGNED))
        found.add((inner, outer - -(-surplus // ALIGNED) * ALIGNED))
    config = model.config.get_text_config()
    attention = map(_attention_of, layer_configs(config) if getattr(config, "num_hidden_layers", 0) else [config])
    return Shapes(tuple(sorted(found)), tuple(dict.fromkeys(filter(None, attention))))


def _attention_of(config) -> Optional[tuple[int, int, int, Optional[int]]]:
    """The attention of a layer, or None for a config without it."""
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    columns, window = (getattr(config, name, None) for name in ("head_dim", "sliding_window"))
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 and heads % kv_heads == 0):
        return None
    columns = columns if isinstance(columns, int) else isinstance(hidden, int) and hidden // heads
    return (heads, kv_heads, columns, window if isinstance(window, int) and window > 0 else None) if columns else None


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
    _compare_calls(PRODUCTS, ATTENTION, library)
    if splits_rows:
        _compare_rows([(inner, outer) for _, inner, outer in PRODUCTS], NO_ROLLOUTS if decodes else NO_RING)
    if decodes:
        _compare_decoding(DECODED)
        _compare_functions()


def test_shapes(shapes: Shapes, splits_rows: bool = False, decodes: bool = False, library: str = "mkl") -> None:
    """`self_test` for a few rows of the products of a model, and for its attention (collective, about a second)."""
    products = [(OWN_TOKENS, *product) for product in shapes.products]
    _compare_calls(products, [(OWN_KEYS, *heads) for heads in shapes.attention], library)
    if splits_rows:
        _compare_rows(shapes.products, NO_ROLLOUTS if decodes else NO_RING)
    if decodes:
        _compare_decoding(shapes.attention)


def _compare_calls(products: Sequence[tuple], attention: Sequence[tuple], library: str) -> None:
    plain = dict(_results(_aligned, products, attention))
    _compare(plain, dict(_results(_aligned, products, attention)), "from one call to the next", "Remove the flag.")
    _compare(plain, dict(_results(_shifted, products, attention)), "with the place in memory", _if_moved(library))
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


def _compare_rows(products: Sequence[tuple[int, int]], instead: str) -> None:
    for inner, outer in products:
        generator = torch.Generator().manual_seed(0)
        rows, weight = (torch.randn(shape, generator=generator) for shape in ((8 * ROWS, inner), (outer, inner)))
        for factor in (weight, weight.T.contiguous().T):  # as in forward, and as in backward
            parts = [F.linear(part, factor) for part in rows.split([ROWS, 5 * ROWS, 2 * ROWS])]
            if not torch.equal(F.linear(rows, factor), torch.cat(parts)):
                found = f"a product with {inner} x {outer} changes on this machine with the number of rows"
                raise UserError("--exact", found, instead=instead)


def _compare_decoding(attention: Sequence[tuple]) -> None:
    """Does a token have the same bits alone as in its sample, in attention?"""
    generator, tokens = torch.Generator().manual_seed(0), torch.arange(70)[None]
    for heads, kv_heads, columns, window in attention:
        query = torch.randn(1, heads, 70, columns, generator=generator)
        key, value = (torch.randn(1, kv_heads, 70, columns, generator=generator) for _ in range(2))
        whole = block_attention(query, key, value, tokens, columns**-0.5, window)
        for at in (0, 31, 32, 69):
            here = tokens[:, at : at + 1]
            alone = block_attention(
                query[:, :, at : at + 1], key[:, :, : at + 1], value[:, :, : at + 1], here, columns**-0.5, window
            )
            if not torch.equal(alone, whole[:, :, at : at + 1]):
                raise UserError(
                    "--exact", "attention of one token has other bits than in its sample", instead=NO_ROLLOUTS
                )


def _compare_functions() -> None:
    """Does a token have the same bits alone as in its sample, in functions of vector code?"""
    values = torch.rand(37, 12, generator=torch.Generator().manual_seed(0)) * 30
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


def _results(make: Callable, products: Sequence[tuple], attention: Sequence[tuple]) -> Iterator[tuple[str, str]]:
    """(name, hash of the result and of all its gradients) of each operation, on tensors from `make`."""
    for tokens, inner, outer in products:
        generator = torch.Generator().manual_seed(0)
        inputs = [make(shape, generator) for shape in ((tokens, inner), (outer, inner), (outer,))]
        yield f"a product of {tokens} x {inner} and {inner} x {outer}", _digest(F.linear(*inputs), inputs)
    for tokens, heads, kv_heads, columns, window in attention:
        generator = torch.Generator().manual_seed(0)
        inputs = [make((1, count, tokens, columns), generator) for count in (heads, kv_heads, kv_heads)]
        query, *states = inputs
        key, value = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in states)
        found = F.scaled_dot_product_attention(query, key, value, **_seen(tokens, window))
        yield f"attention over {tokens} tokens, with {heads} heads of {columns}", _digest(found, inputs)
    inputs = [make((37, 200), torch.Generator().manual_seed(0))]
    yield "log_softmax", _digest(F.log_softmax(inputs[0], -1), inputs)


def _seen(tokens: int, window: Optional[int]) -> dict:
    """What queries see, for scaled_dot_product_attention."""
    if window is None or window >= tokens:
        return {"is_causal": True}
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return {"attn_mask": (distance >= 0) & (distance < window)}


def _digest(result: torch.Tensor, inputs: list[torch.Tensor]) -> str:
    seed = torch.linspace(-1, 1, result.numel()).view(result.shape)
    tensors = [result.detach(), *torch.autograd.grad(result, inputs, seed)]
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()

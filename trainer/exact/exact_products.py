"""Linear layers in fixed pieces, so that tensor parallelism changes no bit.

The dimension that tp may split has 8 pieces on every layout, also on one rank. Each product of a piece has the same shapes
everywhere. Sums over pieces follow one tree: those of a row-parallel forward, and of a column-parallel backward.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.sharded_tensors import to_local_if_dtensor
from trainer.errors import UserError
from trainer.exact.fixed_tiles import linear, product
from trainer.exact.fixed_tree import num_pieces, tree_sum
from trainer.exact.split_rows import SplitRows, give_whole_rows

ALIGNED = 64  # elements: vector code has no tail
ROWS = 8  # a product has a multiple of so many rows: then a row does not depend on the number of rows


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a product: those of tp have other columns or rows of the weight, those of sp other tokens."""

    tp: dist.ProcessGroup
    split: SplitRows
    has_gradient: bool = True  # of the ranks of sp, one computes the gradient of the weight

    def whole(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """(rows, tokens here, width) -> (all tokens, width), in the order of the sample."""
        return [_flat(self.split.whole(tensor)) for tensor in tensors]

    def counted(self, parameter: torch.Tensor | None, gradient: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The gradient of a parameter that this rank computes, or zeros. None if it needs none."""
        if parameter is None or not parameter.requires_grad:
            return None
        return gradient() if self.has_gradient else torch.zeros_like(parameter)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, width) -> (all tokens, width), with zeros behind them up to a multiple of ROWS."""
    flat = tensor.flatten(0, -2)
    return F.pad(flat, (0, 0, 0, -len(flat) % ROWS))


def _like(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Undo `_flat` of `tensor`, whose width may be another."""
    return flat[: tensor.shape[:-1].numel()].view(*tensor.shape[:-1], -1)


class _ByColumns(torch.autograd.Function):
    """inputs (rows, tokens, in) times weight (out here, in): this rank's columns of the output. Backward sums over tp."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, ranks: Ranks) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.ranks, ctx.pieces, ctx.bias = ranks, num_pieces(len(weight), ranks.tp.size()), bias
        flat = _flat(inputs)
        output = _like(torch.cat([linear(flat, piece) for piece in weight.chunk(ctx.pieces)], -1), inputs)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (inputs, weight), (for_inputs, for_weight, for_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        of_inputs, of_weight, of_bias = None, None, None
        if for_inputs:
            pairs = zip(_contiguous(_flat(grad), ctx.pieces, -1), weight.chunk(ctx.pieces))
            of_inputs = _like(tree_sum([product(*pair) for pair in pairs], ctx.ranks.tp), inputs)
        if for_weight or for_bias:
            inputs, grad = ctx.ranks.whole(inputs, grad)
            grads = _contiguous(grad, ctx.pieces, -1)
            of_weight = ctx.ranks.counted(weight, lambda: torch.cat([product(part.T, inputs) for part in grads]))
            of_bias = ctx.ranks.counted(ctx.bias, lambda: torch.cat([part.sum(0) for part in grads]))
        return of_inputs, of_weight, of_bias, None


class _ByRows(torch.autograd.Function):
    """inputs (rows, tokens, in here) times weight (out, in here), summed over tp: the whole output. Backward is local."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, ranks: Ranks) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.ranks, ctx.pieces, ctx.bias = ranks, num_pieces(weight.shape[1], ranks.tp.size()), bias
        pairs = zip(_contiguous(_flat(inputs), ctx.pieces, -1), _contiguous(weight, ctx.pieces, 1))
        output = _like(tree_sum([linear(*pair) for pair in pairs], ranks.tp), inputs)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (inputs, weight), (for_inputs, for_weight, for_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        of_inputs, of_weight, of_bias = None, None, None
        if for_inputs:
            flat = _flat(grad)
            products = [product(flat, piece) for piece in _contiguous(weight, ctx.pieces, 1)]
            of_inputs = _like(torch.cat(products, -1), inputs)
        if for_weight or for_bias:
            inputs, grad = ctx.ranks.whole(inputs, grad)
            parts = _contiguous(inputs, ctx.pieces, -1)
            of_weight = ctx.ranks.counted(weight, lambda: torch.cat([product(grad.T, part) for part in parts], 1))
            of_bias = ctx.ranks.counted(ctx.bias, lambda: grad.sum(0))
        return of_inputs, of_weight, of_bias, None


class _CopyToHeads(torch.autograd.Function):
    """The weight of a norm, a copy for each piece of the heads here. Backward adds up by the tree over `group`."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, pieces: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(weight.clone() for _ in range(pieces))

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return tree_sum(list(grads), ctx.group), None, None


def _contiguous(tensor: torch.Tensor, pieces: int, dim: int) -> list[torch.Tensor]:
    return [piece.contiguous() for piece in tensor.chunk(pieces, dim)]


HEAD_DIMS = {"Qwen3RMSNorm": 2, "Gemma3RMSNorm": 1}  # where the norm of a head has the heads, of its four dimensions
PRODUCTS = {"columns": _ByColumns, "rows": _ByRows, "vocabulary": _ByColumns}


def fix_products(
    model: torch.nn.Module, kinds: dict[str, str], tp_mesh: DeviceMesh, split: SplitRows, shards_logits: bool = True
) -> None:
    """Let layers work in pieces. `kinds` says what tp splits in each: columns, rows, heads or vocabulary.

    The weights are those of this tp rank. Logits become DTensors, sharded over the vocabulary, as the loss needs them. An
    engine needs plain logits.

    Raises:
        UserError: there is tp, but no plan of ours, tp does not divide the vocabulary, or a norm of heads is unknown.
    """
    for flag, size in (("--tensor_parallel_size", tp_mesh.size()), ("--ring_attn_size", split.size)):
        if size > 1 and not kinds:
            found = f"with {flag}: {type(model).__name__} has no plan that keeps every bit"
            raise UserError("--exact", found, f"{flag} 1")
    products = [name for name, kind in kinds.items() if kind in ("columns", "rows")]
    split.shared |= {f"{name}.{weight}" for name in products for weight in ("weight", "bias")}
    token_dims = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        tokens = getattr(module, "vocab_size", None) or getattr(
            module, "out_features", 0
        )  # DeepSpeed's head, or torch's
        if kind == "vocabulary" and tokens % tp_mesh.size():
            found = f"with --exact, {tp_mesh.size()} does not divide the vocabulary of {tokens}"
            raise UserError("--tensor_parallel_size", found, "1, or a divisor")
        if kind == "heads":
            if type(module).__name__ not in HEAD_DIMS:
                raise UserError("--exact", f"with the norm of heads {name}, {type(module).__name__}", sorted(HEAD_DIMS))
            module.forward = functools.partial(_norm_by_heads, module, tp_mesh.get_group())
            token_dims[name] = 3 - HEAD_DIMS[type(module).__name__]
            continue
        becomes_dtensor = (
            shards_logits and kind == "vocabulary" and not hasattr(module, "sharded_logits")
        )  # DeepSpeed's part has a hook
        owner = products.index(name) % split.size if name in products else 0  # the head may share its weight
        ranks = Ranks(tp_mesh.get_group(), split, has_gradient=split.rank == owner)
        module.forward = functools.partial(
            _forward, module, PRODUCTS[kind], ranks, tp_mesh if becomes_dtensor else None
        )
    for name, module in model.named_modules():
        if kinds and name.endswith(".act_fn"):
            module.forward = functools.partial(_without_tail, module.forward)
    give_whole_rows(model, split, token_dims, kinds.keys() - token_dims.keys())


def _forward(module, product, ranks: Ranks, logits_mesh: DeviceMesh | None, inputs: torch.Tensor):
    """The output of a layer. With `logits_mesh`, it becomes a DTensor there."""
    weights = (None if p is None else to_local_if_dtensor(p) for p in (module.weight, module.bias))
    output = product.apply(inputs, *weights, ranks)
    if logits_mesh is None:
        return output
    return DTensor.from_local(output, logits_mesh, [Shard(output.ndim - 1)], run_check=False)


def _norm_by_heads(module, group: dist.ProcessGroup, inputs: torch.Tensor) -> torch.Tensor:
    """A norm of each head, whose weight all heads share: one call for each piece of the heads."""
    dim, weight = HEAD_DIMS[type(module).__name__], module._parameters["weight"]
    pieces = num_pieces(inputs.shape[dim], group.size())
    copies, outputs = _CopyToHeads.apply(to_local_if_dtensor(weight), pieces, group), []
    try:
        for piece, module._parameters["weight"] in zip(_contiguous(inputs, pieces, dim), copies):
            outputs.append(type(module).forward(module, piece))
    finally:
        module._parameters["weight"] = weight
    return torch.cat(outputs, dim)


def _without_tail(function, inputs: torch.Tensor) -> torch.Tensor:
    """An activation of each element, with zeros behind them. The last elements of a tensor would round otherwise."""
    flat = inputs.reshape(-1)
    return function(F.pad(flat, (0, -len(flat) % ALIGNED)))[: len(flat)].view(inputs.shape)

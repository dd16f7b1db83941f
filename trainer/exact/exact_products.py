"""Linear layers in fixed pieces, so that tensor parallelism changes no bit.

The dimension that tp may split has 8 pieces on every layout, also on one rank. Each product of a piece has the same shapes
everywhere. Sums over pieces follow one tree: those of a row-parallel forward, and of a column-parallel backward.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trainer.distributed.sharded_tensors import to_local_if_dtensor
from trainer.errors import UserError
from trainer.exact.fixed_tree import num_pieces, tree_sum

ALIGNED = 64  # elements: vector code has no tail


class _ByColumns(torch.autograd.Function):
    """inputs (tokens, in) times weight (out here, in): this rank's columns of the output. Backward sums over `group`."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group, ctx.pieces, ctx.has_bias = group, num_pieces(len(weight), group.size()), bias is not None
        output = torch.cat([F.linear(inputs, piece) for piece in weight.chunk(ctx.pieces)], -1)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        inputs, weight = ctx.saved_tensors
        grads = _contiguous(grad, ctx.pieces, -1)
        needed, of_inputs = ctx.needs_input_grad, None
        if needed[0]:
            parts = [part @ piece for part, piece in zip(grads, weight.chunk(ctx.pieces))]
            of_inputs = tree_sum(parts, ctx.group)
        of_weight = torch.cat([part.T @ inputs for part in grads]) if needed[1] else None
        of_bias = torch.cat([part.sum(0) for part in grads]) if ctx.has_bias and needed[2] else None
        return of_inputs, of_weight, of_bias, None


class _ByRows(torch.autograd.Function):
    """inputs (tokens, in here) times weight (out, in here), summed over `group`: the whole output. Backward is local."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.pieces, ctx.has_bias = num_pieces(weight.shape[1], group.size()), bias is not None
        pairs = zip(_contiguous(inputs, ctx.pieces, -1), _contiguous(weight, ctx.pieces, 1))
        output = tree_sum([F.linear(*pair) for pair in pairs], group)
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        inputs, weight = ctx.saved_tensors
        grad, needed, of_inputs, of_weight = grad.contiguous(), ctx.needs_input_grad, None, None
        if needed[0]:
            of_inputs = torch.cat([grad @ piece for piece in _contiguous(weight, ctx.pieces, 1)], -1)
        if needed[1]:
            of_weight = torch.cat([grad.T @ piece for piece in _contiguous(inputs, ctx.pieces, -1)], 1)
        return of_inputs, of_weight, grad.sum(0) if ctx.has_bias and needed[2] else None, None


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


def fix_products(model: torch.nn.Module, kinds: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Let layers work in pieces. `kinds` says what tp splits in each: columns, rows, heads or vocabulary.

    The weights are those of this tp rank. Logits become DTensors, sharded over the vocabulary, as the loss needs them.

    Raises:
        UserError: there is tp, but no plan of ours, tp does not divide the vocabulary, or a norm of heads is unknown.
    """
    if tp_mesh.size() > 1 and not kinds:
        found = f"with --tensor_parallel_size: {type(model).__name__} has no plan that keeps every bit"
        raise UserError("--exact", found, "--tensor_parallel_size 1")
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
            continue
        becomes_dtensor = kind == "vocabulary" and not hasattr(module, "sharded_logits")  # DeepSpeed's part has a hook
        module.forward = functools.partial(_forward, module, PRODUCTS[kind], tp_mesh, becomes_dtensor)
    for name, module in model.named_modules():
        if kinds and name.endswith(".act_fn"):
            module.forward = functools.partial(_without_tail, module.forward)


def _forward(module, product, tp_mesh: DeviceMesh, becomes_dtensor: bool, inputs: torch.Tensor):
    weights = (None if p is None else to_local_if_dtensor(p) for p in (module.weight, module.bias))
    output = product.apply(inputs.flatten(0, -2), *weights, tp_mesh.get_group())
    output = output.view(*inputs.shape[:-1], -1)
    return DTensor.from_local(output, tp_mesh, [Shard(output.ndim - 1)], run_check=False) if becomes_dtensor else output


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

"""Collectives with gradients, for layers whose heads, experts or tokens are sharded over ranks."""

from typing import Optional

import torch
import torch.distributed as dist


class Gather(torch.autograd.Function):
    """(rows, ...) of each rank -> (ranks * rows, ...) on all. The gradient of a part is the sum of all ranks' for it."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _own_sum(grad, ctx.group), None


class ScatterSum(torch.autograd.Function):
    """(ranks * rows, ...) of each rank -> (rows, ...): this rank's rows of the sum over ranks. Backward gathers."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own_sum(tensor, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _gathered(grad, ctx.group), None


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:])
    dist.all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered


def _own_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    own = tensor.new_empty(len(tensor) // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_single(own, tensor.contiguous(), group=group)
    return own


class AllToAll(torch.autograd.Function):
    """The rows that the ranks of `group` send to this one, in the order of the ranks. Backward sends gradients back.

    This rank sends its first `send_sizes[0]` rows to rank 0, and so on. It receives `receive_sizes[0]` rows of rank 0.
    With None for both, every rank sends the same number of rows to each rank.
    """

    @staticmethod
    def forward(
        ctx,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        receive_sizes: Optional[list[int]],
        send_sizes: Optional[list[int]],
    ) -> torch.Tensor:
        ctx.group, ctx.receive_sizes, ctx.send_sizes = group, receive_sizes, send_sizes
        received = rows.new_empty(len(rows) if receive_sizes is None else sum(receive_sizes), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return AllToAll.apply(grad, ctx.group, ctx.send_sizes, ctx.receive_sizes), None, None, None


class Sum(torch.autograd.Function):
    """Sum over the ranks. Backward: identity, because every rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


class SumGradients(torch.autograd.Function):
    """Identity of any number of tensors. Backward sums their gradients over the ranks, in one all-reduce."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        needed = [grad for grad, needs in zip(grads, ctx.needs_input_grad[1:]) if needs]
        total = torch.cat([grad.flatten() for grad in needed])
        dist.all_reduce(total, group=ctx.group)
        parts = iter(total.split([grad.numel() for grad in needed]))
        sums = [next(parts).view(grad.shape).to(grad.dtype) if needs else None
                for grad, needs in zip(grads, ctx.needs_input_grad[1:])]  # fmt: skip
        return None, *sums

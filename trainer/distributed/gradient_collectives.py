"""Collectives with gradients, for blocks whose heads are shared out over ranks."""

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

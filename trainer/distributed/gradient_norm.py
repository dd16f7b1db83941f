"""One gradient norm over every mesh dimension, and one clipping rule."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.distributed.sharded_tensors import to_local_if_dtensor


def _sharding_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which `tensor` is sharded. It is replicated over all other groups."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(f"a gradient with unreduced placements {tensor.placements} has no norm")
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


@torch.no_grad()
def get_grad_norm(parameters: Iterable[torch.nn.Parameter], sharding_groups=None) -> torch.Tensor:
    """Return the global L2 norm of all gradients: a float64 scalar, equal on every rank. Each parameter counts once.

    Gradients are grouped by the process groups that shard them. Each sum of squares is all-reduced (sum) over exactly
    these process groups. So a parameter that is replicated over tp is not counted tp times.
    `sharding_groups(parameter)` returns these process groups for parameters that are not DTensors.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in with_grad]
    by_groups = defaultdict(list)
    for parameter, grad in zip(with_grad, grads):
        groups = sharding_groups(parameter) if sharding_groups else _sharding_groups(grad)
        by_groups[groups].append(to_local_if_dtensor(grad))
    total = torch.zeros((), dtype=torch.float64, device=to_local_if_dtensor(grads[0]).device if grads else "cpu")
    for groups, local_grads in by_groups.items():
        norms = torch.stack(torch._foreach_norm(local_grads, 2, dtype=torch.float32))
        square = norms.double().square().sum()
        for group in groups:
            dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
        total += square
    return total.sqrt()


@torch.no_grad()
def clip_grad_by_total_norm_(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, total_norm: torch.Tensor
) -> None:
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)), the coefficient of torch and of DeepSpeed.

    With `max_norm` 0, gradients do not change.
    """
    if max_norm <= 0:
        return
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1.0).float()
    grads = [to_local_if_dtensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for grad in grads:
        grad.mul_(coefficient.to(grad.device))

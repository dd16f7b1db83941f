"""Tensors of any placement: their parts, one gradient norm and one clipping rule; and the dynamic loss scale of fp16."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, without its history (all-gather over the mesh of a DTensor)."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local_region(tensor: torch.Tensor) -> Optional[tuple[slice, ...]]:
    """The part of the whole tensor that this rank holds, as one slice per dimension; None for all of it."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def _sharding_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which `tensor` is cut into different parts; over all others it is replicated."""
    if not isinstance(tensor, DTensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(f"a gradient with unreduced placements {tensor.placements} has no norm")
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


@torch.no_grad()
def get_grad_norm(parameters: Iterable[torch.nn.Parameter], sharding_groups=None) -> torch.Tensor:
    """The global L2 norm of all gradients, a float64 scalar equal on every rank, each parameter counted once.

    Gradients are grouped by the process groups that shard them; each group's sum of squares is all-reduced (sum) over
    just those, so a parameter replicated over tp is not counted tp times. `sharding_groups(parameter)` names these
    groups where parameters are no DTensors.
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
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)), torch's and DeepSpeed's coefficient.

    `max_norm` 0 leaves them as they are.
    """
    if max_norm <= 0:
        return
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1.0).float()
    grads = [to_local_if_dtensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for grad in grads:
        grad.mul_(coefficient.to(grad.device))


class DynamicLossScale:
    """The loss scale of fp16: halved on overflow, doubled after `growth_interval` good steps (Micikevicius et al. 2018)."""

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 2000):
        self.scale = initial if enabled else 1.0
        self.enabled, self.growth_interval, self.good_steps = enabled, growth_interval, 0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    to_local_if_dtensor(parameter.grad).mul_(1.0 / self.scale)

    def update(self, overflow: bool) -> None:
        if not self.enabled:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps % self.growth_interval == 0:
            self.scale *= 2

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict) -> None:
        if self.enabled:
            self.scale, self.good_steps = state["scale"], state["good_steps"]

"""AdamW of operations that round once each. So an element's step does not depend on its place in a tensor.

A fused step, and operations such as lerp and addcmul, may round twice at the end of a tensor and once elsewhere, or the
other way round: vector code has fused multiply-adds that scalar code lacks. Shards end at other places on each layout.
"""

import math
from collections.abc import Iterator

import torch

from trainer.distributed.sharded_tensors import to_local_if_dtensor
from trainer.exact.exact_sums import PIECE
from trainer.optimizers.adamw import states_of


class ExactAdamW(torch.optim.AdamW):
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), with the states of torch's AdamW."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    def _step_one(self, group: dict, parameter: torch.Tensor) -> None:
        state, (beta1, beta2) = states_of(self, parameter), group["betas"]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        state["step"] += 1
        step, lr = state["step"].item(), float(group["lr"])
        for weight, gradient, moment, square in _pieces(*map(to_local_if_dtensor, tensors)):
            moment.mul_(beta1).add_(gradient * (1 - beta1))
            square.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            root = square.sqrt().mul_(1 / math.sqrt(1 - beta2**step)).add_(group["eps"])
            if group["weight_decay"]:
                weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_((moment * (lr / (1 - beta1**step))).div_(root))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors in pieces that stay in the processor's cache, as views."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    return zip(*(tensor.view(-1).split(PIECE) for tensor in tensors))


def with_single_roundings(optimizer: torch.optim.AdamW) -> ExactAdamW:
    """Return the same AdamW, before its first step, with a step that rounds in the same way everywhere."""
    groups = [
        {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
        for group in optimizer.param_groups
    ]
    return ExactAdamW(groups)

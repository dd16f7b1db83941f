"""`--optim adafactor`: torch's Adafactor (Shazeer and Stern 2018) for sharded weights (DTensor).

Adafactor works on whole matrices. One matrix at a time is gathered over the mesh of its parameter. Every rank computes
the same step and keeps its own part of the result. So every layout takes the same step as one process.
"""

import torch
from torch.optim._adafactor import adafactor

from trainer.distributed.sharded_tensors import local_region, to_local_if_dtensor, whole
from trainer.optimizers.adamw import decay_groups, states_of


class Adafactor(torch.optim.Optimizer):
    """torch's Adafactor without momentum. It keeps one number per row and per column. Every rank holds all of them."""

    def __init__(self, groups: list[dict], *, lr: float):
        super().__init__(groups, {"lr": lr})

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        shape, device = tuple(parameter.shape), parameter.device
        state = {"step": torch.zeros(())}
        if len(shape) < 2:
            return {**state, "variance": torch.zeros(shape, device=device)}
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {**state, "row_var": torch.zeros(rows, device=device), "col_var": torch.zeros(columns, device=device)}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        constants = {"d": 1.0, "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "maximize": False, "foreach": False}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, weight, region = states_of(self, parameter), whole(parameter), local_region(parameter)
                memory = ([state.get(kind)] for kind in ("row_var", "col_var", "variance", "step"))
                options = {"lr": group["lr"], "weight_decay": group["weight_decay"], **constants}
                adafactor([weight], [whole(parameter.grad)], *memory, **options)
                if region is not None:
                    to_local_if_dtensor(parameter).copy_(weight[region])


def build_adafactor(model: torch.nn.Module, *, lr: float, weight_decay: float) -> Adafactor:
    """Build Adafactor, which has no betas."""
    return Adafactor(decay_groups(model.named_parameters(), weight_decay), lr=lr)

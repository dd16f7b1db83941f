"""`--optim muon|adafactor`: optimizers that look at whole matrices, over weights that a mesh may have cut; `build` knows
adamw_8bit, too.

Torch's AdamW needs no such care, since it works on single elements. Here a matrix is put together from its parts
(all-gather over the mesh of the parameter), one at a time, every rank computes the same step of it and keeps its own part
of the result. So the step is that of one process, whatever the layout.
"""

import math

import torch
from torch.optim._adafactor import adafactor
from transformers.pytorch_utils import Conv1D

from trainer.errors import UserError
from trainer.strategies import adamw_8bit
from trainer.strategies.common import decay_groups
from trainer.strategies.gradients import local_region, to_local_if_dtensor, whole
from trainer.strategies.run_state import adam_state, states_of

MOMENTUM = 0.95
# Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks: a x + b x^3 + c x^5, five times over, brings
# singular values from (0, 1] to about 1
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon(torch.optim.Optimizer):
    """Muon for the linear layers of decoder layers, AdamW for everything else, both at one learning rate.

    An orthogonalized update is scaled to the size of AdamW's, 0.2 sqrt(max(rows, columns)) (Liu et al. 2025, Muon is
    scalable for LLM training, equation 4). Nesterov momentum, decoupled weight decay. Momentum is fp32 and cut like the weight.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float):
        """`groups` say whether they are of matrices for Muon: `is_matrix`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.matrices = {id(p) for group in self.param_groups if group["is_matrix"] for p in group["params"]}

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(parameter)} if id(parameter) in self.matrices else adam_state(parameter)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["is_matrix"]:
                adamw_8bit.step_in_fp32(self, group, parameters)
                continue
            for parameter in parameters:
                momentum = states_of(self, parameter)["momentum"]
                _step_matrix(parameter, momentum, group["lr"], group["weight_decay"])


def _step_matrix(parameter: torch.Tensor, momentum: torch.Tensor, lr: float, weight_decay: float) -> None:
    momentum.lerp_(parameter.grad, 1 - MOMENTUM)
    update = orthogonalized(whole(parameter.grad.lerp(momentum, MOMENTUM)))
    local, region = to_local_if_dtensor(parameter), local_region(parameter)
    local.mul_(1 - lr * weight_decay)
    local.add_(update if region is None else update[region], alpha=-lr * 0.2 * math.sqrt(max(update.shape)))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """U S V^T of a (rows, columns) matrix with its singular values S brought near 1, by matrix products alone.

    fp32, where others take bf16: the iteration multiplies small singular values, and with them roundings, by up to 485,
    and layouts differ by roundings.
    """
    a, b, c = COEFFICIENTS
    x = matrix.float()
    x = x / x.norm().clamp(min=1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Adafactor(torch.optim.Optimizer):
    """torch's Adafactor (Shazeer and Stern 2018), without momentum: of a matrix it remembers a number for each row and each
    column, which every rank holds."""

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


def build(name: str, model: torch.nn.Module, *, lr: float, betas, eps: float, weight_decay: float):
    """The optimizer of --optim, over the parameters of a model that is cut already. Raises UserError for flags not of it."""
    if name == "adamw_8bit":
        return adamw_8bit.build(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    groups = decay_groups(model.named_parameters(), weight_decay)
    if name == "adafactor":
        if tuple(betas) != (0.9, 0.95):
            raise UserError("--adam_betas", f"{tuple(betas)} with --optim adafactor, which has none", "leave it out")
        return Adafactor(groups, lr=lr)
    matrices = _layer_matrices(model)
    if not any(parameter.requires_grad and id(parameter) in matrices for parameter in model.parameters()):
        raise UserError("--optim", f"muon with {type(model).__name__}, whose layers are not known", "adamw, adafactor")
    parts = [
        {**group, "is_matrix": is_matrix, "params": [p for p in group["params"] if (id(p) in matrices) == is_matrix]}
        for group in groups
        for is_matrix in (True, False)
    ]
    return Muon([part for part in parts if part["params"]], lr=lr, betas=tuple(betas), eps=eps)


def _layer_matrices(model: torch.nn.Module) -> set[int]:
    """Ids of the weights of the linear layers in decoder layers: no embedding, no head, no experts stacked in one tensor."""
    layers = set(model._no_split_modules or [])
    return {
        id(module.weight)
        for layer in model.modules()
        if any(kind.__name__ in layers for kind in type(layer).__mro__)  # FSDP2 puts a class of its own in front
        for module in layer.modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
    }

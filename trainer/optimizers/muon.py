"""`--optim muon`: orthogonalized momentum, for sharded weights (DTensor).

Muon works on whole matrices. Each rank gathers some of them, orthogonalizes them, and sends the results to all. Each
rank keeps its own part of a result. So every layout takes the same step as one process.
"""

import math

import torch
import torch.distributed as dist
from transformers.pytorch_utils import Conv1D

from trainer.distributed.decoder_layers import decoder_layers
from trainer.distributed.sharded_tensors import local_region, to_local_if_dtensor, whole
from trainer.errors import UserError
from trainer.optimizers.adamw import adam_state, decay_groups, states_of
from trainer.optimizers.adamw_8bit import step_in_fp32

MOMENTUM = 0.95
# Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks. Five iterations of a x + b x^3 + c x^5
# bring singular values from (0, 1] to about 1.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon(torch.optim.Optimizer):
    """Muon for the linear layers of decoder layers, AdamW for everything else. Both use one learning rate.

    0.2 sqrt(max(rows, columns)) scales an orthogonalized update to the size of AdamW's update (Liu et al. 2025, Muon is
    scalable for LLM training, equation 4). Momentum is Nesterov's, in fp32, and sharded like the weight. Weight decay is
    decoupled.
    """

    def __init__(self, groups: list[dict], *, lr: float, betas: tuple[float, float], eps: float):
        """`is_matrix` of a group says whether Muon steps its parameters."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        matrices = (p for group in self.param_groups if group["is_matrix"] for p in group["params"])
        is_matrix = any(parameter is matrix for matrix in matrices)
        return {"momentum": torch.zeros_like(parameter)} if is_matrix else adam_state(parameter)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["is_matrix"]:
                step_in_fp32(self, group, parameters)
                continue
            _step_matrices(self, parameters, group["lr"], group["weight_decay"])


def _step_matrices(optimizer, parameters: list[torch.Tensor], lr: float, weight_decay: float) -> None:
    """Step matrices that all ranks hold, or parts of them: one matrix per rank at a time."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if num_ranks > 1 else 0
    for start in range(0, len(parameters), num_ranks):
        chosen = parameters[start : start + num_ranks]
        for owner, parameter in enumerate(chosen):
            momentum = states_of(optimizer, parameter)["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
            matrix = whole(parameter.grad.lerp(momentum, MOMENTUM))
            if owner == rank:
                mine = orthogonalized(matrix).contiguous()
        for owner, parameter in enumerate(chosen):
            update = mine if owner == rank else torch.empty(parameter.shape, device=parameter.device)
            if num_ranks > 1:
                dist.broadcast(update, owner)
            local, region = to_local_if_dtensor(parameter), local_region(parameter)
            local.mul_(1 - lr * weight_decay)
            local.add_(update if region is None else update[region], alpha=-lr * 0.2 * math.sqrt(max(update.shape)))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values S of a (rows, columns) matrix U S V^T near 1, by matrix products only.

    This runs in fp32, where others use bf16. The iteration multiplies small singular values by up to 485, and rounding
    errors with them. Layouts differ by rounding errors.
    """
    a, b, c = COEFFICIENTS
    x = matrix.float()
    x = x / x.norm().clamp(min=1e-7)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def build_muon(model: torch.nn.Module, *, lr: float, betas, eps: float, weight_decay: float) -> Muon:
    """Build Muon for `model`. Raises UserError if the decoder layers of the model are not known."""
    matrices = _layer_matrices(model)
    if not any(parameter.requires_grad and id(parameter) in matrices for parameter in model.parameters()):
        raise UserError("--optim", f"muon with {type(model).__name__}, whose layers are not known", "adamw, adafactor")
    parts = [
        {**group, "is_matrix": is_matrix, "params": [p for p in group["params"] if (id(p) in matrices) == is_matrix]}
        for group in decay_groups(model.named_parameters(), weight_decay)
        for is_matrix in (True, False)
    ]
    return Muon([part for part in parts if part["params"]], lr=lr, betas=tuple(betas), eps=eps)


def _layer_matrices(model: torch.nn.Module) -> set[int]:
    """Return ids of the weights of linear layers in decoder layers: not embeddings, heads or experts in one tensor."""
    return {
        id(module.weight)
        for layer in decoder_layers(model).values()
        for module in layer.modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
    }

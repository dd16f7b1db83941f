"""Adapters on experts that are shared out over ranks: each rank adds the update of its own experts to their weights.

peft wraps the experts of a layer once for each adapted tensor. Its matrices hold all experts, and FSDP gathers them with
the layer. peft's own forward pass would add whole updates to weights that FSDP has not gathered yet.
"""

import functools

import torch
from torch import nn


def share_out_updates(model: nn.Module, place: int) -> None:
    """Replace the forward passes of peft's wrappers of experts in `model`. `place` is this rank's among their holders."""
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "get_delta_factors"):
            module.forward = functools.partial(_forward, module, place)


def _forward(wrapper, place: int, *args, **kwargs) -> torch.Tensor:
    experts = wrapper.get_base_layer()
    updates = vars(experts).setdefault("weight_updates", {})
    if not wrapper.disable_adapters:
        updates[wrapper.parameter_name] = functools.partial(_updated, wrapper, place)
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        updates.clear()


def _updated(wrapper, place: int, weight: torch.Tensor) -> torch.Tensor:
    """W + alpha / rank * B A of the experts in `weight`, (experts here, rows, columns)."""
    *factors, scale = wrapper.get_delta_factors(wrapper.active_adapters[0])
    left, right = (factor.narrow(0, place * len(weight), len(weight)).to(weight.dtype) for factor in factors)
    with torch.autocast(weight.device.type, enabled=False):
        return torch.baddbmm(weight, left, right, alpha=scale)

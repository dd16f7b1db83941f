"""Mixtures of experts in vLLM: where it holds the stacked experts of a layer, and how an update reaches them on CPU."""

from collections.abc import Iterator

import torch

from trainer.distributed.weight_slices import Box, box_of
from trainer.errors import UserError

PARTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}  # vLLM's name -> the name in transformers


class ExpertsPart:
    """Where vLLM holds this tp rank's shard of all experts of a layer, with the methods of a WeightPart.

    A rank has the same columns of each matrix of each expert. Gate and up are stacked: (experts, 2 * columns, hidden).
    """

    def __init__(self, parameter: torch.Tensor, module: torch.nn.Module, kind: str):
        self._parameter, self._kind, self._config = parameter, kind, module.moe_config

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        rank, size = self._config.tp_rank, self._config.moe_parallel_config.tp_size
        if self._kind == "w2_weight":
            return full.tensor_split(size, 2)[rank]
        return full.unflatten(1, (2, -1)).tensor_split(size, 2)[rank].flatten(1, 2)

    def box(self, shape: tuple[int, ...]) -> Box:
        """The whole tensor: a shard has two separate parts, one of gate and one of up."""
        return box_of(shape)

    def of_slice(self, value: torch.Tensor) -> torch.Tensor:
        return self.cut(value)

    def held(self) -> torch.Tensor:
        return self._parameter.detach()


def experts_part(name: str, parameter: torch.Tensor, module: torch.nn.Module) -> tuple[str, ExpertsPart] | None:
    """(name of the tensor in transformers, part) of a parameter of routed experts. None for any other parameter."""
    # vllm is an extra
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    owner, _, kind = name.rpartition(".")
    if not isinstance(module, RoutedExperts) or kind not in PARTS:
        return None
    return f"{owner.removesuffix('.routed_experts')}.{PARTS[kind]}", ExpertsPart(parameter, module, kind)


def _packed_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, object]]:
    """(layer, kernel) of experts whose weights vLLM packs for its CPU kernel after they are loaded."""
    # vllm is an extra
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            kernel = module.quant_method.moe_kernel.fused_experts
            if isinstance(kernel, CPUUnquantizedExperts) and not kernel._use_zentorch:
                yield module, kernel


def check_experts(model: torch.nn.Module) -> None:
    """Raise UserError if vLLM on CPU has padded the experts of `model`. An update does not fit into these."""
    for module, kernel in _packed_experts(model):
        size = module.moe_config.intermediate_size_per_partition
        if kernel._padded_intermediate_size(module.moe_config) != size:
            found = f"vllm on the CPU with experts of {size} columns on a rank"
            raise UserError("--rollout_engine", found, f"hf, or a multiple of {kernel._intermediate_alignment()}")


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the experts of vLLM on CPU in place. An update has overwritten them with plain weights."""
    from vllm._custom_ops import cpu_prepack_moe_weight  # vllm is an extra

    for module, kernel in _packed_experts(model):
        for kind in PARTS:
            weight = getattr(module, kind).data
            weight.copy_(cpu_prepack_moe_weight(weight, kernel.isa))

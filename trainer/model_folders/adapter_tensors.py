"""The tensors of a model with an adapter (peft's LoRA layers): the adapter's own tensors, and their first values.
Also their names in the base model's folder and in peft's files."""

import copy
from collections.abc import Iterable, Iterator
from typing import Optional

import torch

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name for the only adapter of a model


def adapter_config(model: torch.nn.Module):
    """peft's configuration of the adapter on `model`; None if there is none."""
    return getattr(model, "peft_config", {}).get(NAME)


def is_of_adapter(name: str, config) -> bool:
    """Whether a tensor is trained and saved with the adapter: its matrices, and modules such as a reward head."""
    return ".lora_" in name or name.rpartition(".")[0] in (config.modules_to_save or ())


def base_name(name: str) -> str:
    """The name in a folder of the base model. ...q_proj.base_layer.weight becomes ...q_proj.weight.

    peft wraps experts once for each adapted tensor: ...experts.base_layer.base_layer.down_proj.
    """
    return name.replace(".base_layer", "")


def peft_name(name: str) -> str:
    """The name in an adapter file. ...q_proj.lora_A.default.weight becomes base_model.model....q_proj.lora_A.weight."""
    return f"base_model.model.{name}".replace(f".{NAME}.", ".")


def initial_tensors(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """{name: fp32 tensor} of a new adapter; empty for a model without one.

    A is uniform in +-1 / sqrt(inputs), as in peft, and depends only on the seed. B is zero. `model` must have the
    shapes of whole tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:  # (rank, inputs)
            bound = parameter.shape[1] ** -0.5
            tensors[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:  # (outputs, rank)
            tensors[name] = torch.zeros(parameter.shape)
    return tensors


def save_adapter_config(model: torch.nn.Module, folder: str) -> None:
    """Write peft's adapter_config.json as peft writes it, for inference. Every run writes the same file."""
    config = copy.copy(adapter_config(model))
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)
    config.save_pretrained(folder)


def merging_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `merge_adapter` needs a tensor of a model in `dtype`: fp32 in adapted layers."""
    return torch.float32 if name.endswith(".base_layer.weight") or ".lora_" in name else dtype


def merge_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], model, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge an adapter into its base: W + alpha / rank B A, in fp32, then cast (Hu et al. 2021, section 4.1).

    Yields all full tensors of the plain model, and holds back the weight of one layer at a time. Without an adapter,
    the tensors pass unchanged.
    """
    config, held = adapter_config(model), {}  # held: weight, A and B of layers that are not complete, in this order
    for name, tensor in tensors:
        layer, _, _ = name.removesuffix(".base_layer.weight").partition(".lora_")
        if config is None or layer == name:
            yield base_name(name), tensor
            continue
        held.setdefault(layer, []).append(tensor.float())
        if len(held[layer]) == 3:
            weight, a, b = held.pop(layer)
            update = (b @ a).T if model.get_submodule(layer).fan_in_fan_out else b @ a  # a Conv1D has W transposed
            yield f"{layer}.weight", (weight + (config.lora_alpha / config.r) * update).to(dtype)


class WeightsWithAdapter:
    """The weights of a base model's folder and the new tensors of an adapter, under the names of the combined model."""

    def __init__(self, base, new_tensors: dict[str, torch.Tensor]):
        self._base, self._new = base, new_tensors

    def dtype(self, name: str) -> str:
        return "F32" if name in self._new else self._base.dtype(base_name(name))

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        if name not in self._new:
            return self._base.read(base_name(name), region)
        return self._new[name] if region is None else self._new[name][region]

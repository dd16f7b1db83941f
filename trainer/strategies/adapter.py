"""The tensors of a model with an adapter (peft's LoRA layers): which are the adapter's own, their names in the base model's
folder and in peft's files, and how a tensor-parallel plan cuts them."""

import copy
from collections.abc import Iterable, Iterator
from typing import Optional

import torch

from trainer.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name for the only adapter of a model
# style of a layer in a plan -> those of its own weight, of A and of B. A behind a column-parallel layer is a replica whose
# output every tp rank has, and B is cut as the layer; A before a row-parallel layer is cut as the layer, B is a replica
STYLES = {
    "colwise": ("colwise", "replicated_in_block", "colwise"),
    "rowwise": ("rowwise", "rowwise", "replicated"),
}


def adapter_config(model: torch.nn.Module):
    """peft's configuration of the adapter on `model`; None where there is none."""
    return getattr(model, "peft_config", {}).get(NAME)


def is_of_adapter(name: str, config) -> bool:
    """Whether a tensor is trained and saved with the adapter: its matrices, and modules such as a reward head."""
    return ".lora_" in name or name.rpartition(".")[0] in (config.modules_to_save or ())


def base_name(name: str) -> str:
    """The name in a folder of the base model: ...q_proj.base_layer.weight is there ...q_proj.weight."""
    return name.replace(".base_layer.", ".")


def peft_name(name: str) -> str:
    """The name in an adapter file: ...q_proj.lora_A.default.weight is there base_model.model....q_proj.lora_A.weight."""
    return f"base_model.model.{name}".replace(f".{NAME}.", ".")


def save_adapter_config(model: torch.nn.Module, folder: str) -> None:
    """Write peft's adapter_config.json, for use and not for training, as peft writes it; the same file on every run."""
    config = copy.copy(adapter_config(model))
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)
    config.save_pretrained(folder)


def merge_adapter(tensors: Iterable[tuple[str, torch.Tensor]], model) -> Iterator[tuple[str, torch.Tensor]]:
    """All full tensors of a model with an adapter as those of a plain one: W + alpha / rank B A, in fp32 (Hu et al. 2021,
    section 4.1). Of a model without an adapter, what comes. Holds back the weight of one layer at a time."""
    config, held = adapter_config(model), {}  # held: weight, A and B of layers that are not complete, in this order
    for name, tensor in tensors:
        layer, _, _ = name.removesuffix(".base_layer.weight").partition(".lora_")
        if config is None or layer == name:
            yield base_name(name), tensor
            continue
        held.setdefault(layer, []).append(tensor.float())
        if len(held[layer]) == 3:
            weight, a, b = held.pop(layer)
            yield f"{layer}.weight", weight + (config.lora_alpha / config.r) * (b @ a)


class WeightsWithAdapter:
    """The weights of a base model's folder, and new tensors of an adapter, under the names of the model that has both."""

    def __init__(self, base, new_tensors: dict[str, torch.Tensor]):
        self._base, self._new = base, new_tensors

    def dtype(self, name: str) -> str:
        return "F32" if name in self._new else self._base.dtype(base_name(name))

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        if name not in self._new:
            return self._base.read(base_name(name), region)
        return self._new[name] if region is None else self._new[name][region]


def plan_with_adapter(plan: dict[str, str], model: torch.nn.Module, flag: str) -> dict[str, str]:
    """A complete plan of the base model, for `model` with an adapter. Raises UserError for layers that it cannot cut."""
    adapted = {_pattern(name) for name, module in model.named_modules() if hasattr(module, "base_layer")}
    result = {pattern: style for pattern, style in plan.items() if pattern not in adapted}
    for pattern in sorted(adapted):
        if plan[pattern] not in STYLES:
            raise UserError(flag, f"--target_modules {pattern}, which the plan treats as {plan[pattern]}", f"{flag} 1")
        names = ("base_layer", f"lora_A.{NAME}", f"lora_B.{NAME}")
        result |= {f"{pattern}.{name}": style for name, style in zip(names, STYLES[plan[pattern]])}
    return result


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))

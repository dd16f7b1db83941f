"""The tensors of a model with an adapter (peft's LoRA layers): the adapter's own tensors, and their first values.
Also their names in the base model's folder and in peft's files."""

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Optional

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import UserError, one_line
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import ADAPTER_WEIGHTS, how_to_merge, read_adapter

MAGNITUDE = ".lora_magnitude_vector."  # of DoRA: the lengths of the rows of the weight
NAME = "default"  # peft's name for the only adapter of a model
BLOCK = 64  # rows of a weight whose update is computed at once


def adapter_config(model: torch.nn.Module):
    """peft's configuration of the adapter on `model`; None if there is none."""
    return getattr(model, "peft_config", {}).get(NAME)


def is_of_adapter(name: str, config) -> bool:
    """Whether a tensor is trained and saved with the adapter: its matrices, and modules such as a reward head."""
    return ".lora_" in name or any(f".{module}." in f".{name}" for module in config.modules_to_save or ())


def base_name(name: str) -> str:
    """The name in a folder of the base model. ...q_proj.base_layer.weight becomes ...q_proj.weight.

    peft wraps experts once for each adapted tensor: ...experts.base_layer.base_layer.down_proj.
    """
    return name.replace(".base_layer", "")


def peft_name(name: str) -> str:
    """The name in an adapter file. ...q_proj.lora_A.default.weight becomes base_model.model....q_proj.lora_A.weight."""
    name = name.removesuffix(".weight") if MAGNITUDE in name else name
    return f"base_model.model.{name}.".replace(f".{NAME}.", ".").removesuffix(".")


def start_from(model: torch.nn.Module, folder: str, flag: str) -> None:
    """Let the adapter on `model` begin with the tensors of an adapter folder, which `flag` named.

    A head that the folder lacks keeps the values of its base. Raises UserError if the folder does not fit.
    """
    config, tensors = adapter_config(model), {**dict(model.named_buffers()), **dict(model.named_parameters())}
    own = {peft_name(name): tensor for name, tensor in tensors.items() if is_of_adapter(name, config)}
    held = read_tensors(folder, flag)
    odd = sorted(name for name in own.keys() ^ held.keys() if ".lora_" in name or name in held)
    odd += [name for name in own.keys() & held.keys() if shape_of(own[name]) != tuple(held[name].shape)]
    if odd:
        found = f"{folder} does not fit the model: {counted(len(odd), 'tensor is', 'tensors are')} in only one of the two, such as {odd[0]}"
        raise UserError(flag, found, "an adapter of this model, with the same flags")
    vars(model)["first_values"] = {name: held[peft_name(name)] for name in tensors if peft_name(name) in held}


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a whole tensor, also of one that ZeRO 3 has partitioned."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def read_tensors(folder: str, flag: str) -> dict[str, torch.Tensor]:
    """{name in the file: fp32 tensor} of an adapter folder. Raises UserError if the file is broken."""
    path = os.path.join(folder, ADAPTER_WEIGHTS)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(flag, f"{path} cannot be read: {one_line(error)}", "a complete adapter") from None


def initial_tensors(model: torch.nn.Module, seed: int, rank: Optional[int] = None) -> dict[str, torch.Tensor]:
    """{name: fp32 tensor} with which an adapter begins; empty for a model without one. See also `start_from`.

    A is uniform in +-1 / sqrt(inputs), as in peft, and depends only on the seed. B is zero. The lengths of DoRA are those of
    the base, which is not read here. `model` must have the
    shapes of whole tensors. With `rank`, A is that of an adapter of this rank, (rank, inputs).
    """
    if "first_values" in vars(model):
        return vars(model)["first_values"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:  # (rank, inputs)
            bound = parameter.shape[1] ** -0.5
            shape = (rank or parameter.shape[0], parameter.shape[1])
            tensors[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:  # (outputs, rank)
            tensors[name] = torch.zeros(parameter.shape)
    return tensors


def save_adapter_config(model: torch.nn.Module, folder: str) -> None:
    """Write peft's adapter_config.json as peft writes it, for inference. Every run writes the same file."""
    config = copy.copy(adapter_config(model))
    config.inference_mode = True
    if not isinstance(config.target_modules, str):  # a regular expression stays
        config.target_modules = sorted(config.target_modules or ())
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
        module = model.get_submodule(layer)
        if len(held[layer]) == 3 + bool(module.use_dora[NAME]):
            weight, a, b, *magnitude = held.pop(layer)
            update = (b @ a).T if module.fan_in_fan_out else b @ a  # a Conv1D has W transposed
            weight = weight + module.scaling[NAME] * update
            for lengths in magnitude:  # DoRA (Liu et al. 2024, equation 5)
                factors = lengths / row_lengths(weight, module.fan_in_fan_out)
                weight = weight * (factors if module.fan_in_fan_out else factors[:, None])
            yield f"{layer}.weight", weight.to(dtype)


def row_lengths(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The Euclidean lengths (outputs,) of the rows of a weight, or of the columns of a `transposed` one."""
    return torch.linalg.norm(weight, dim=0 if transposed else 1)


class WeightsWithAdapter:
    """The weights of a base model's folder and the new tensors of an adapter, under the names of the combined model.

    Lengths of DoRA that are not among the new tensors are those of the base. `transposed` says its linear layers are.
    """

    def __init__(self, base, new_tensors: dict[str, torch.Tensor], transposed: bool):
        self._base, self._new, self._transposed = base, new_tensors, transposed

    def dtype(self, name: str) -> str:
        return "F32" if name in self._new or MAGNITUDE in name else self._base.dtype(base_name(name))

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        if name not in self._new and MAGNITUDE not in name:
            return self._base.read(base_name(name), region)
        tensor = self._new.get(name)
        if tensor is None:
            weight = self._base.read(f"{name.partition(MAGNITUDE)[0]}.weight").float()
            tensor = row_lengths(weight, self._transposed)
        return tensor if region is None else tensor[region]


class MergedWeights:
    """The weights of a base model with the update of an adapter folder added, in fp32, read slice by slice.

    W + scale B A, where the scale is alpha / rank (Hu et al. 2021), or alpha / square root of the rank (rsLoRA). A module that the adapter holds as a whole replaces
    that of the base. `shapes` are those of the model, whose linear layers may be `transposed`. Raises UserError if the folder
    does not fit.
    """

    def __init__(self, base, folder: str, shapes: dict[str, tuple[int, ...]], transposed: bool):
        facts = read_adapter(folder, folder)
        odd = ("target_parameters", "alpha_pattern", "rank_pattern", "use_dora")
        if any(facts.config.get(name) for name in odd):
            found = "it has experts, DoRA, or ranks that differ by layer, which only the command export merges"
            raise UserError(folder, found, instead=how_to_merge(folder))
        divisor = facts.rank**0.5 if facts.use_rslora else facts.rank
        self._base, self._scale, self._transposed = base, facts.alpha / divisor, transposed
        held = {name.removeprefix("base_model.model."): tensor for name, tensor in read_tensors(folder, folder).items()}
        layers = [name.removesuffix(".lora_A.weight") for name in held if name.endswith(".lora_A.weight")]
        self._updates = {
            f"{layer}.weight": (held.pop(f"{layer}.lora_A.weight"), held.pop(f"{layer}.lora_B.weight", torch.empty(0)))
            for layer in layers
        }
        self._whole = held
        odd = [name for name, (a, b) in self._updates.items() if shapes.get(name) != self._shape(a, b)]
        odd += [name for name, tensor in held.items() if shapes.get(name) != tuple(tensor.shape)]
        if odd:
            found = f"does not fit its base model: {counted(len(odd), 'tensor has', 'tensors have')} no place, such as {min(odd)}"
            raise UserError(folder, found, "an adapter of this model")

    def _shape(self, a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            return ()
        return (a.shape[1], b.shape[0]) if self._transposed else (b.shape[0], a.shape[1])

    def dtype(self, name: str) -> str:
        return "F32" if name in self._updates or name in self._whole else self._base.dtype(name)

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        if name in self._whole:
            return self._whole[name] if region is None else self._whole[name][region]
        weight = self._base.read(name, region)
        if name not in self._updates:
            return weight
        a, b = self._updates[name]
        left, right = (a.T, b.T) if self._transposed else (b, a)
        rows, columns = region or (slice(None), slice(None))
        return weight.float() + self._scale * _rows_of_product(left, right, rows)[:, columns]


def _rows_of_product(left: torch.Tensor, right: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return (left @ right)[rows], bitwise the same for any slice.

    The bits of a product depend on its shape. So blocks of BLOCK rows and all columns are computed, as for the whole.
    """
    start, stop, _ = rows.indices(len(left))
    first = start - start % BLOCK
    blocks = left[first : -(-stop // BLOCK) * BLOCK].split(BLOCK)
    return torch.cat([block @ right for block in blocks])[start - first : stop - first]

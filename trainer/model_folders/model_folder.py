"""Read Hugging Face model folders: any slice of any weight, directly from the files. Nothing is unpickled."""

import copy
import json
import os
from typing import Optional

import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from trainer.errors import UserError
from trainer.limits import is_inside, read_model_config
from trainer.model_folders import adapter_tensors
from trainer.model_folders.folder_names import INDEX, SINGLE, find_weights
from trainer.model_folders.other_weights import UnreadWeights, load_bin
from trainer.model_folders.published_names import PublishedWeights, check_fit
from trainer.model_folders.quantized_folder import DequantizedFolder

GENERATION_CONFIG = "generation_config.json"
FULL_PRECISION = ("F64", "F32", "F16", "BF16")
left_out = False  # whether weights are zeros that no file is opened for: a checkpoint will replace them


class SafetensorsFolder:
    """The weights of a model folder by name. Only the requested slices are read from disk."""

    is_quantized = False

    def __init__(self, folder: str):
        index = os.path.join(folder, INDEX)
        if os.path.exists(index):
            with open(index) as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        else:
            files = [SINGLE]
        if outside := next((file for file in files if not is_inside(file)), None):
            raise UserError(index, f"names a file outside of its folder: {outside}", "names of files beside it")
        self._open = [safe_open(os.path.join(folder, file), framework="pt") for file in files]
        self._where = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 (no mapping)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def dtype(self, name: str) -> str:
        return self._where[name].get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` (one slice per dimension) selects."""
        if region is None or not self.shape(name):
            return self._where[name].get_tensor(name)
        return self._where[name].get_slice(name)[region]


def unwrapped(model) -> torch.nn.Module:
    """The Hugging Face model itself, without the engine that a strategy may have put around it."""
    return getattr(model, "module", model)  # the name in DeepSpeed and DistributedDataParallel


def all_tensors(model) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model: its state dict without aliases of tied weights."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


def stored_tensors(model) -> dict[str, torch.Tensor]:
    """The part of `all_tensors` in a model folder or a checkpoint. With an adapter, only what is trained with it."""
    tensors = all_tensors(model)
    if not has_adapter(model):
        return tensors
    config = adapter_tensors.adapter_config(model)
    return {name: tensor for name, tensor in tensors.items() if adapter_tensors.is_of_adapter(name, config)}


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether peft has put LoRA layers into `model`."""
    return "peft_config" in vars(model)


def new_tensors(model, seed: int) -> dict[str, torch.Tensor]:
    """The first values of an adapter, from the seed; no folder holds them yet. `model` must have its full shapes."""
    if not has_adapter(model):
        return {}
    return adapter_tensors.initial_tensors(model, seed)


def open_weights(model, folder: str, names: list[str], new: dict[str, torch.Tensor], adapter: Optional[str] = None):
    """The weights of `folder` and the `new` tensors, under the model's own names.

    `adapter` is the folder of an adapter whose update is added. Returns an object with `read(name, region)` and `dtype(name)`.

    Raises:
        UserError: a weight is missing, or the adapter does not fit.
    """
    if left_out:
        return UnreadWeights(model)
    if has_adapter(model):
        names = [adapter_tensors.base_name(name) for name in names if name not in new and ".lora_" not in name]
    weights = _open_folder(model, folder, names)
    if adapter:
        weights = _merged(model, weights, adapter)
    transposed = any(isinstance(module, Conv1D) for module in model.modules())  # GPT-2
    return adapter_tensors.WeightsWithAdapter(weights, new, transposed) if has_adapter(model) else weights


def _merged(model, weights, adapter: str):
    with torch.device("meta"):  # the parameters of `model` may be sharded, partitioned, or below another adapter
        skeleton = plain_class(model)(copy.deepcopy(model.config))
    shapes = {name: tuple(tensor.shape) for name, tensor in all_tensors(skeleton).items()}
    transposed = any(isinstance(module, Conv1D) for module in skeleton.modules())  # GPT-2
    return adapter_tensors.MergedWeights(weights, adapter, shapes, transposed)


def _open_folder(model, folder: str, names: list[str]):
    """Open the weights of a folder. They are read slice by slice, but .bin files are loaded to host memory first."""
    if find_weights(folder) == "bin":
        return load_bin(plain_class(model), model.config, folder, names)
    weights = open_files(folder)
    if not _has_own_names(model, weights, names):
        weights = published_weights(model, folder)
    missing = next((name for name in names if name not in weights), None)
    if missing:
        raise UserError(folder, f"has no weight {missing}", "a complete model")
    return weights


def published_weights(model, folder: str, flag: str = ""):
    """The weights of a folder whose tensors have other names than in `model`."""
    with torch.device("meta"):  # the parameters of `model` may be sharded, partitioned or packed
        skeleton = plain_class(model)(copy.deepcopy(model.config))
    return PublishedWeights(skeleton, all_tensors(skeleton), open_files(folder, flag), folder, flag or folder)


def open_files(folder: str, flag: str = ""):
    """The safetensors of a folder. Quantized weights are read in fp32."""
    weights, config = SafetensorsFolder(folder), quantization(folder)
    if not config:
        return weights
    return DequantizedFolder(weights, folder, config, flag or folder)


def read_config(folder: str, trust_remote_code: bool):
    """The config of a model folder, without its quantization: weights are read, and saved, in full precision."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        if not isinstance(part, PreTrainedConfig):
            found = f"the part of the text model is {str(part)[:40]!r}"
            raise UserError(f"{folder}/config.json", found, "an object, as it was published")
        vars(part).pop("quantization_config", None)
    return config


def quantization(folder: str) -> Optional[dict]:
    """The quantization_config of a folder, or None."""
    config = read_model_config(folder)
    return config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")


def _has_own_names(model, weights, names: list[str]) -> bool:
    """Whether the folder holds the tensors as the model does: transformers has nothing to rename or to join."""
    return not get_model_conversion_mapping(model, add_legacy=False) and all(name in weights for name in names)


def plain_class(model) -> type:
    """The class of the model; fully_shard has put one of its own in front, FSDP<class>."""
    return next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def restore_computed_buffers(model, device: torch.device, dtypes: Optional[dict[str, torch.dtype]] = None) -> None:
    """Compute again the buffers that no model folder holds (RoPE tables, embedding scales).

    They are computed on the CPU and then moved to `device`: a GPU would give other last bits. If `model` was built in a
    dtype that rounds them, `dtypes` are their dtypes in an fp32 model, by name.

    Raises:
        UserError: transformers leaves one of them without a value.
    """
    computed = []
    stored = set(model.state_dict())
    for name, buffer in list(model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        if name in stored:
            buffer = model.get_submodule(path)._buffers[leaf] = buffer.to(device)  # needed if masters stay on the host
            buffer._is_hf_initialized = True
            continue
        dtype = buffer.dtype if dtypes is None else dtypes[name]
        model.get_submodule(path)._buffers[leaf] = torch.full(buffer.shape, _unset(dtype), dtype=dtype, device="cpu")
        computed.append(name)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers initialises only what does not have this mark
    for path, module in model.named_modules():  # a module around a buffer may compute it
        module._is_hf_initialized = path and not any(name.startswith(f"{path}.") for name in computed)
    sharded_class = type(model)
    model.__class__ = plain_class(model)  # transformers takes FSDP's class for remote code, and skips modules then
    try:
        model.initialize_weights()
    finally:
        model.__class__ = sharded_class
    for name in computed:
        buffer = model.get_buffer(name)
        if buffer.isnan().any() or (buffer.dtype != torch.bool and (buffer == _unset(buffer.dtype)).any()):
            raise UserError(
                type(model).__name__, f"transformers computes no value for the buffer {name}", "another model"
            )
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = buffer.to(device)


def _unset(dtype: torch.dtype) -> float | int:
    """A value that no computed buffer has; there is none for booleans."""
    return float("nan") if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


def read_generation_config(model, folder: str) -> None:
    """Give a model built only from its config the generation config of its folder, as from_pretrained does."""
    if model.can_generate() and os.path.exists(os.path.join(folder, GENERATION_CONFIG)):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def check_weights(model, folder: str, flag: str) -> list[str]:
    """Compare a model, whose weights are whole, with the safetensors of its folder, by names, shapes and dtypes.

    Returns the names in the folder that are not part of the model.

    Raises:
        UserError: a tensor of the model is missing, or has another shape or an unknown form. `flag` named the folder.
    """
    if find_weights(folder, flag) == "bin":
        return []
    held, weights = {**dict(model.named_buffers()), **dict(model.named_parameters())}, SafetensorsFolder(folder)

    def fits(name: str) -> bool:
        shape = getattr(held[name], "ds_shape", held[name].shape)  # ZeRO 3 leaves an empty tensor
        return weights.shape(name) == tuple(shape) and weights.dtype(name) in FULL_PRECISION

    if set(weights.names()) == set(all_tensors(model)) and all(map(fits, weights.names())):
        return []
    return check_fit(published_weights(model, folder, flag), FULL_PRECISION)

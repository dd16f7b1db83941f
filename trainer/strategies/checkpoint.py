"""Hugging Face model folders: read any slice of a weight, write weights in bounded shards. No unpickling."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Optional

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.errors import UserError
from trainer.strategies import adapter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION_CONFIG = "generation_config.json"


class SafetensorsFolder:
    """The weights of a model folder by name, each read from disk only where it is sliced."""

    def __init__(self, folder: str):
        index = os.path.join(folder, INDEX)
        if os.path.exists(index):
            with open(index) as file:
                files = sorted(set(json.load(file)["weight_map"].values()))
        else:
            files = [SINGLE]
        self._open = [safe_open(os.path.join(folder, file), framework="pt") for file in files]
        self._where = {name: handle for handle in self._open for name in handle.keys()}  # noqa: SIM118 (no mapping)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def dtype(self, name: str) -> str:
        return self._where[name].get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` (a slice per dimension) names."""
        if region is None or not self.shape(name):
            return self._where[name].get_tensor(name)
        return self._where[name].get_slice(name)[region]


class LoadedWeights:
    """Weights that transformers has loaded and converted, behind the same calls as a SafetensorsFolder."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        return self._tensors[name] if region is None else self._tensors[name][region]


def all_tensors(model) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a model is made of: the state dict without aliases of tied weights."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


def stored_tensors(model) -> dict[str, torch.Tensor]:
    """What a model folder or a checkpoint holds of `all_tensors`: with an adapter, only what is trained with it."""
    config, tensors = adapter.adapter_config(model), all_tensors(model)
    if config is None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if adapter.is_of_adapter(name, config)}


def open_weights(model, folder: str, names: list[str]):
    """The weights of `folder`, and those of a new adapter, under the model's own names (objects with `read` and `dtype`).

    Raises UserError naming one that is missing.
    """
    names = [adapter.base_name(name) for name in names if name not in model.new_tensors]
    weights = _open_folder(model, folder, names)
    return adapter.WeightsWithAdapter(weights, model.new_tensors) if model.new_tensors else weights


def _open_folder(model, folder: str, names: list[str]) -> SafetensorsFolder | LoadedWeights:
    """Safetensors whose names are the model's are read slice by slice. Where transformers has to convert (other names,
    fused experts, .bin files), it loads the whole model into host memory first.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if find_weights(folder) == "safetensors" and not get_model_conversion_mapping(model, add_legacy=False):
        weights = SafetensorsFolder(folder)
        if all(name in weights for name in names):
            return weights
    model_class = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    loaded, info = model_class.from_pretrained(
        folder, config=model.config, dtype=torch.float32, weights_only=True, output_loading_info=True
    )
    missing = [name for name in names if name in info["missing_keys"]]
    if missing:
        raise UserError("--pretrain", f"{folder} has no weight {missing[0]}", "a complete model")
    return LoadedWeights(loaded.state_dict())


def restore_computed_buffers(model, device: torch.device) -> None:
    """Compute again, in fp32 on `device`, the buffers that no model folder holds (RoPE tables, embedding scales).

    For a model built on the meta device, or under a context that rounded them to the compute dtype.
    """
    stored = set(model.state_dict())
    for name, buffer in list(model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        if name in stored:
            buffer = model.get_submodule(path)._buffers[leaf] = buffer.to(device)  # where masters stay on the host
            buffer._is_hf_initialized = True
            continue
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        model.get_submodule(path)._buffers[leaf] = torch.empty(buffer.shape, dtype=dtype, device=device)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers initialises just what does not carry this mark
    model.initialize_weights()


def read_generation_config(model, folder: str) -> None:
    """Give a model that was built from its config alone the generation config of its folder, as from_pretrained does."""
    from transformers import GenerationConfig

    if model.can_generate() and os.path.exists(os.path.join(folder, GENERATION_CONFIG)):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def find_weights(folder: str) -> str:
    """'safetensors' or 'bin', whichever weights the model folder holds; raises UserError for neither."""
    names = os.listdir(folder)
    if INDEX in names or SINGLE in names:
        return "safetensors"
    if any(name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json")) for name in names):
        return "bin"
    raise UserError("--pretrain", f"{folder} holds no weights", f"a folder with {SINGLE} or {INDEX}")


def save_safetensors_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: str, max_shard_bytes: int) -> None:
    """Write (name, CPU tensor) pairs as safetensors files of at most `max_shard_bytes` (or one tensor) each.

    Only one shard is in memory at a time. The files get their final names, with the count in them, at the end.
    """
    shards: list[list[str]] = []
    total = 0
    for number, shard in enumerate(_in_shards(tensors, max_shard_bytes)):
        total += sum(tensor.nbytes for tensor in shard.values())
        save_file(shard, os.path.join(folder, f"shard-{number}"), metadata={"format": "pt"})
        shards.append(list(shard))
    if len(shards) == 1:
        os.replace(os.path.join(folder, "shard-0"), os.path.join(folder, SINGLE))
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(os.path.join(folder, f"shard-{number}"), os.path.join(folder, file))
        weight_map.update(dict.fromkeys(names, file))
    with open(os.path.join(folder, INDEX), "w") as out:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, out, indent=2, sort_keys=True)


def in_hub_format(model, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) pairs as published models of this kind have them: the experts that transformers holds in one
    tensor are apart there. One at a time, except where the published tensor is made of several."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        yield from tensors
    elif any(len(conversion.target_patterns) > 1 for conversion in conversions):
        yield from revert_weight_conversion(model, dict(tensors)).items()
    else:
        for name, tensor in tensors:
            yield from revert_weight_conversion(model, {name: tensor}).items()


def save_adapter(tensors: Iterable[tuple[str, torch.Tensor]], folder: str) -> None:
    """Write (name, CPU tensor) pairs of an adapter in one file, under peft's names."""
    own = {adapter.peft_name(name): tensor.contiguous() for name, tensor in tensors}
    save_file(own, os.path.join(folder, adapter.ADAPTER_WEIGHTS), metadata={"format": "pt"})


def _in_shards(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def fresh_folder(folder: str) -> str:
    """An empty folder beside `folder` to write into; `os.replace` it over the final name once complete."""
    temporary = folder.rstrip("/") + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    return temporary


def commit_folder(temporary: str, folder: str) -> None:
    """Give a complete folder its final name, replacing an older one of that name."""
    if os.path.exists(folder):
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def save_pretrained(
    tensors: Optional[Iterable[tuple[str, torch.Tensor]]],
    model,
    tokenizer,
    folder: str,
    dtype: torch.dtype,
    writes: bool,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Write a Hugging Face folder: config, generation config, tokenizer with chat template, weights in `dtype`; with an
    adapter, a folder of peft, its weights in fp32.

    Every rank iterates `tensors`, whose gathering is collective; the rank that `writes` holds one shard at a time.
    Without `tensors`, all but the weights. Raises UserError on the rank that writes if it cannot.
    """

    folder = os.path.realpath(folder)  # the name of a link stays: what it names is replaced
    with_adapter = adapter.adapter_config(model) is not None
    dtype = torch.float32 if with_adapter else dtype

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if writes:
                yield name, tensor.to(dtype).cpu() if tensor.is_floating_point() else tensor.cpu()

    if not writes:
        for _ in converted() if tensors is not None else ():
            pass
        return
    try:
        temporary = fresh_folder(folder)
        _save_configs(model, dtype, temporary)
        tokenizer.save_pretrained(temporary)
        if tensors is not None and with_adapter:  # in one file, as peft wants it
            save_adapter(converted(), temporary)
        elif tensors is not None:
            save_safetensors_shards(in_hub_format(model, converted()), temporary, max_shard_bytes)
        commit_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder + ".tmp", ignore_errors=True)
        raise UserError(folder, f"cannot be written: {error}") from None


def _save_configs(model, dtype: torch.dtype, folder: str) -> None:
    config = model.config
    config.dtype = str(dtype).removeprefix("torch.")
    # fully_shard renames the class of a module to FSDP<class>
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if adapter.adapter_config(model) is not None:
        adapter.save_adapter_config(model, folder)
    elif model.can_generate():  # its save_pretrained refuses what older models have: a temperature without do_sample
        model.generation_config.to_json_file(os.path.join(folder, GENERATION_CONFIG), use_diff=True)

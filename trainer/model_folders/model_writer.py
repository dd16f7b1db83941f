"""Write Hugging Face model folders: weights in shards of limited size, under the names of published models."""

import copy
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Optional

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from trainer.distributed.collectives import gather_objects, local_rank, together
from trainer.errors import UserError
from trainer.model_folders import adapter_tensors
from trainer.model_folders.adapter_folder import ADAPTER_WEIGHTS
from trainer.model_folders.folder_names import INDEX, SINGLE
from trainer.model_folders.model_folder import GENERATION_CONFIG, plain_class, published_weights
from trainer.model_folders.safetensors_stream import SafetensorsStream

PROCESSORS_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
WRITERS_PER_NODE = 4  # each holds a tensor in host memory, and a disk is busy with few
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def save_safetensors_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: str, max_shard_bytes: int) -> None:
    """Write (name, CPU tensor) pairs as safetensors files of at most `max_shard_bytes` (or one tensor) each.

    Only one tensor is in memory at a time.
    """
    _name_shards(_write_shards(tensors, folder, max_shard_bytes), folder)


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: str, max_shard_bytes: int, part: int = 0, num_parts: int = 1
) -> list[SafetensorsStream]:
    """Write this rank's files: number `part`, `part + num_parts` and so on. The bytes of the others are dropped."""
    shards: list[SafetensorsStream] = []
    for name, tensor in tensors:
        if not shards or not shards[-1].fits(name, tensor):
            if shards:
                shards[-1].close()
            is_own = len(shards) % num_parts == part
            path = os.path.join(folder, f"shard-{len(shards)}") if is_own else os.devnull
            shards.append(SafetensorsStream(path, max_shard_bytes))
        shards[-1].add(name, tensor)
        del tensor  # it may be a view of a larger one, which would stay while the next one is gathered
    shards[-1].close()
    return shards


def _name_shards(shards: list[SafetensorsStream], folder: str) -> None:
    """Give complete files their final names, which contain the count, and write the index."""
    if len(shards) == 1:
        os.replace(os.path.join(folder, "shard-0"), os.path.join(folder, SINGLE))
        return
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(os.path.join(folder, f"shard-{number}"), os.path.join(folder, file))
        weight_map.update(dict.fromkeys(shard.names, file))
    with open(os.path.join(folder, INDEX), "w") as out:
        total = sum(shard.size for shard in shards)
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, out, indent=2, sort_keys=True)


def in_hub_format(
    model, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Convert (name, CPU tensor) pairs to the names and forms of the folder that the model comes from.

    After them come the tensors of that folder that are not part of a language model, such as a vision tower. Pairs
    come one at a time, except if a published tensor is made of several. If the folder is gone or holds .bin files, names
    and forms are as in published models of this kind.
    """
    weights = source_of(model)
    if weights is None:
        yield from _in_usual_format(model, tensors)
        return
    yield from weights.as_published(tensors)
    if model.can_generate():  # a reward model needs neither the head nor the tower of its base
        for name, tensor in weights.untouched():
            yield name, tensor.to(dtype) if weights.files.is_quantized and tensor.is_floating_point() else tensor


def source_of(model):
    """The PublishedWeights of the folder that `model.name_or_path` names, or None if it has no safetensors."""
    folder = model.name_or_path
    held = os.listdir(folder) if os.path.isdir(folder) else []
    return published_weights(model, folder) if SINGLE in held or INDEX in held else None


def _in_usual_format(model, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):  # transformers finds its rules by the name of the class, which fully_shard changes
        skeleton = plain_class(model)(copy.deepcopy(model.config))
    conversions = get_model_conversion_mapping(skeleton, add_legacy=False)
    if not conversions:
        yield from tensors
    elif any(len(conversion.target_patterns) > 1 for conversion in conversions):
        yield from revert_weight_conversion(skeleton, dict(tensors)).items()
    else:
        for name, tensor in tensors:
            yield from revert_weight_conversion(skeleton, {name: tensor}).items()


def save_source_config(model, dtype: torch.dtype, folder: str) -> None:
    """Write the config of the folder whose language model was trained, such as the folder of a model of text and images.

    The files of its processor come too. Without such a folder, the config of the model stays. A whole model of text and
    images keeps its own config, and also gets the files of its processor.
    """
    weights = source_of(model) if model.can_generate() else None
    config = weights.config() if weights else {}
    pixels = vars(model).get("image_pixels", {})  # of a model that was trained with images
    is_same_kind = bool(weights) and config["model_type"] == model.config.model_type
    if is_same_kind and model.config.get_text_config() is not model.config:
        copy_processor(weights.folder, folder, pixels)
    if not weights or not weights.unread or is_same_kind:
        return
    for part in (config, config.get("text_config", {})):
        part.pop("torch_dtype", None)
        part["dtype"] = str(dtype).removeprefix("torch.")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)
    copy_processor(weights.folder, folder, pixels)


def copy_processor(source: str, folder: str, pixels: dict[str, int]) -> None:
    """Copy the files that say how images, videos and sounds become tensors.

    `pixels` are limits of an image in place of those of the source: {"max_pixels": N, "min_pixels": M} or fewer.
    """
    for name in os.listdir(source):
        if name.endswith("processor_config.json"):
            shutil.copy(os.path.join(source, name), folder)
            if pixels and name in PROCESSORS_OF_IMAGES:
                _limit_pixels(os.path.join(folder, name), pixels)


def _limit_pixels(path: str, pixels: dict[str, int]) -> None:
    """Write limits of pixels in both forms that transformers reads: names of their own, and edges of the size."""
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    own = values if "image_processor_type" in values else values.get("image_processor")
    if own:
        own |= pixels
        if "size" in own:
            own["size"] |= {EDGES[name]: value for name, value in pixels.items()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2)


def save_adapter(tensors: Iterable[tuple[str, torch.Tensor]], folder: str) -> None:
    """Write the (name, CPU tensor) pairs of an adapter to one file, under peft's names."""
    own = {adapter_tensors.peft_name(name): tensor.contiguous() for name, tensor in tensors}
    save_file(own, os.path.join(folder, ADAPTER_WEIGHTS), metadata={"format": "pt"})


def fresh_folder(folder: str) -> str:
    """Make an empty folder next to `folder` to write into. Once it is complete, `os.replace` it over the final name."""
    temporary = folder.rstrip("/") + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    return temporary


def commit_folder(temporary: str, folder: str) -> None:
    """Give a complete folder its final name. It replaces an older folder of that name."""
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
    """Write a Hugging Face folder: config, generation config, tokenizer with chat template, and weights in `dtype`.

    With an adapter, write a peft folder with weights in fp32. Every rank iterates `tensors`, because gathering them is
    collective. Several ranks share the files of weights, and hold one tensor at a time. The rank that `writes` writes
    the rest. Without `tensors`, write everything but the weights. Raises UserError on all ranks if one cannot write.
    """

    folder = os.path.realpath(folder)  # a link stays, and the folder that it points to is replaced
    temporary, with_adapter = folder + ".tmp", adapter_tensors.adapter_config(model) is not None
    dtype, gathered = torch.float32 if with_adapter else dtype, iter(() if tensors is None else tensors)
    shards: list[SafetensorsStream] = []

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in gathered:
            tensor = tensor.to(dtype).cpu() if tensor.is_floating_point() else tensor.cpu()
            yield name, tensor
            del tensor  # not held while the next one is gathered

    def begin() -> str:
        fresh_folder(folder)
        _save_configs(model, dtype, temporary)
        tokenizer.save_pretrained(temporary)
        return _new_mark(temporary)

    def write(part: Optional[int], num_parts: int) -> None:
        try:
            if with_adapter and writes:  # one file, as peft expects
                save_adapter(converted(), temporary)
            elif not with_adapter and part is not None:
                pairs = in_hub_format(model, converted(), dtype)
                shards.extend(_write_shards(pairs, temporary, max_shard_bytes, part, num_parts))
        finally:
            deque(gathered, maxlen=0)  # the other ranks gather, also if this one cannot write

    def end(mark: str) -> None:
        os.remove(os.path.join(temporary, mark))
        if shards:
            _name_shards(shards, temporary)
            save_source_config(model, dtype, temporary)
        commit_folder(temporary, folder)

    faults = {"where": folder, "problem": "cannot be written", "errors": (OSError, SafetensorError)}
    try:
        [mark, *_] = together(lambda: begin() if writes else None, **faults)
        if tensors is not None:
            part, num_parts = _own_part(temporary, mark)
            together(lambda: write(part, num_parts), **faults)
        together(lambda: end(mark) if writes else None, **faults)
    except UserError:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save_configs(model, dtype: torch.dtype, folder: str) -> None:
    config = model.config
    config.dtype = dtype
    # fully_shard renames the class of a module to FSDP<class>
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    adapter = adapter_tensors.adapter_config(model)
    if adapter is None or adapter.modules_to_save:  # a config.json beside an adapter would hide its base from
        config.save_pretrained(folder)  # AutoModelForCausalLM; a reward head needs its number of labels
    if adapter is not None:
        adapter_tensors.save_adapter_config(model, folder)
    elif model.can_generate():  # its save_pretrained refuses older configs with a temperature without do_sample
        model.generation_config.to_json_file(os.path.join(folder, GENERATION_CONFIG), use_diff=True)


# --- several ranks write the files of one new folder


def _new_mark(folder: str) -> str:
    """Write an empty file by which other ranks know this folder from one of the same name. Returns its name."""
    name = f"writers-{os.urandom(8).hex()}"
    open(os.path.join(folder, name), "w").close()
    return name


def _own_part(folder: str, mark: str) -> tuple[Optional[int], int]:
    """(this rank's number among the writers, or None; the number of writers). One all-gather over all ranks.

    The first ranks of each node write, if they see the folder. One rank of each node comes first.
    """
    number = local_rank()
    writes = number < WRITERS_PER_NODE and os.path.exists(os.path.join(folder, mark))
    found = enumerate(gather_objects((number, writes)))
    writers = [rank for _, rank in sorted((local, rank) for rank, (local, writes) in found if writes)]
    own = dist.get_rank() if dist.is_initialized() else 0
    return (writers.index(own) if own in writers else None), len(writers)

"""Where vLLM holds the weights of a Hugging Face model, how updates get there, and the proof that they arrived."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from trainer.distributed.weight_slices import Box, Slices
from trainer.errors import UserError, one_line
from trainer.rollout.engines.checksum import Checksum, slice_sum
from trainer.rollout.engines.on_vllm.vllm_experts import experts_part, pack_experts


class WrongWeights(RuntimeError):
    """The engine holds other bits than those that came."""


@torch.no_grad()
def load_checked(model, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[str, int]:
    """Load the full tensors by vLLM's own loader, which fuses, slices and copies. Returns their (checksum, bytes).

    Raises UserError if vLLM has no place for a tensor, and WrongWeights if it does not then hold, bit for bit, what came.
    """
    parts = weight_parts(model)
    full, came, num_bytes, loading = Checksum(), Checksum(), 0, ""

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes, loading
        for name, tensor in tensors:
            place = place_of(model, parts, name)
            if place not in parts:
                raise UserError("--rollout_engine", f"vllm, which keeps {name} in a form that cannot be checked", "hf")
            value = tensor.to(dtype) if tensor.is_floating_point() else tensor
            num_bytes += value.nbytes
            full.add(name, value)
            cut, room = parts[place].cut(value), parts[place].held()
            if cut.numel() != room.numel():
                found = f"vllm, which has room for {list(room.shape)} of {name}, and {list(cut.shape)} came"
                raise UserError("--rollout_engine", found, "a model of the same sizes")
            came.add(place, cut)
            loading = name
            yield name, value
            loading = ""

    try:
        model.load_weights(watched())
    except (AssertionError, KeyError, ValueError) as error:
        if not loading:  # not of vLLM's loader
            raise
        found = f"vllm, whose loader does not take {loading}: {type(error).__name__} {one_line(error)}"
        raise UserError("--rollout_engine", found, "hf") from None
    _check_held(parts, came)
    pack_experts(model)
    return full.hexdigest(), num_bytes


def _check_held(parts: dict, came: Checksum) -> None:
    """Raise WrongWeights if `parts` hold other bits than the tensors that `came` was made from."""
    held = Checksum()
    for name, part in parts.items():
        held.add(name, part.held())
    if came.hexdigest() != held.hexdigest():
        raise WrongWeights("the rollout engine's weights are not the weights that were sent to it")


@torch.no_grad()
def load_slices(
    model, tensors: Iterable[tuple[str, torch.Tensor]], slices: Slices, ranks_per_engine: int
) -> tuple[dict[str, int], int]:
    """Copy this rank's slices to where vLLM holds them. Returns what they add to the sums of the full tensors, and bytes."""
    parts, came, num_bytes, sums = weight_parts(model), Checksum(), 0, {}
    rank = dist.get_rank()
    first = rank // ranks_per_engine * ranks_per_engine
    for name, tensor in tensors:
        shape, boxes = slices.boxes[name]
        assert parts[name].box(shape) == boxes[rank]  # `box` also notes the padding of a part of the vocabulary
        value = parts[name].of_slice(tensor)
        parts[name].held().copy_(value)
        came.add(name, value)
        num_bytes += tensor.nbytes
        only_here = boxes[rank] not in boxes[first:rank]  # else a rank of this engine before it counts the slice
        starts = [start for start, _ in boxes[rank]]
        sums[name] = slice_sum(tensor, starts, shape) if only_here and tensor.numel() else 0
    _check_held(parts, came)
    pack_experts(model)
    return sums, num_bytes


def place_of(model, parts: dict, name: str) -> str:
    """The name in `parts` of a tensor. vLLM nests the parts of a model of images in its own way."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return name if name in parts or mapper is None else mapper.map_name(name) or name


def checksum_of_slices(sums: dict[str, int], ranks_per_engine: int, device: torch.device) -> str:
    """The checksum of the full tensors that the ranks of this engine have slices of (all-reduce over the world)."""
    number = dist.get_rank() // ranks_per_engine
    of_engines = torch.zeros(dist.get_world_size() // ranks_per_engine, len(sums), dtype=torch.int64)
    of_engines[number] = torch.tensor(list(sums.values()))
    of_engines = of_engines.to(device)
    dist.all_reduce(of_engines)
    full = Checksum()
    for name, value in zip(sums, of_engines[number].tolist()):
        full.add_sum(name, value)
    return full.hexdigest()


class WeightPart:
    """Where vLLM holds this tp rank's shard of a Hugging Face tensor: rows `[start, start + num_rows)` of a parameter."""

    def __init__(self, parameter: torch.Tensor, module: torch.nn.Module, start: int, num_rows: int):
        self._parameter, self._module, self._start, self._num_rows = parameter, module, start, num_rows
        self._used_rows = num_rows  # fewer if padding rows follow

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """The part of the full tensor that this rank should hold.

        Rank 1 of 2 holds the last two of 4 rows if it has room for 2, and all 4 if it has room for 4. Of 3 rows of the
        vocabulary it holds the last one, and padding.
        """
        rank = getattr(self._module, "tp_rank", 0)
        size = getattr(self._module, "tp_size", 1)
        if _is_vocabulary(self._module):
            full = full[rank * self._num_rows :][: self._num_rows]
            self._used_rows = len(full)
        else:
            full = _share(full, 0, self._num_rows, rank, size)
        return _share(full, 1, self._parameter.shape[1], rank, size) if full.ndim > 1 else full

    def box(self, shape: tuple[int, ...]) -> Box:
        """The slice of a full tensor of `shape` that `cut` gives."""
        full = torch.empty(shape, device="meta")
        part = self.cut(full)
        starts = [part.storage_offset() // stride % size for stride, size in zip(full.stride(), shape)]
        return tuple((start, start + size) for start, size in zip(starts, part.shape))

    def of_slice(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def held(self) -> torch.Tensor:
        return self._parameter.detach()[self._start : self._start + self._used_rows]


def _share(full: torch.Tensor, dim: int, local_size: int, rank: int, size: int) -> torch.Tensor:
    """The shard of `full` for `rank` of `size`. `local_size` decides how many different shards there are: if there are
    fewer key-value heads than ranks, several ranks have the same one."""
    num_shards = max(full.shape[dim] // max(local_size, 1), 1)
    return full.narrow(dim, rank * num_shards // size * local_size, local_size) if num_shards > 1 else full


def _is_vocabulary(module: torch.nn.Module) -> bool:
    # vllm is an extra
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding)


def weight_parts(model: torch.nn.Module) -> dict[str, WeightPart]:
    """Parts by their names in the Hugging Face model. vLLM's `qkv_proj` holds `q_proj`, `k_proj` and `v_proj`."""
    parts: dict[str, WeightPart] = {}
    fused = getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        module, (parent, _, last) = model.get_submodule(owner), owner.rpartition(".")
        if experts := experts_part(name, parameter, module):
            parts[experts[0]] = experts[1]
            continue
        if len(fused.get(last, ())) < 2:
            parts[name] = WeightPart(parameter, module, 0, parameter.shape[0])
            continue
        start = 0
        for member, num_rows in zip(fused[last], module.output_partition_sizes):
            parts[f"{parent}.{member}.{kind}"] = WeightPart(parameter, module, start, num_rows)
            start += num_rows
    return parts

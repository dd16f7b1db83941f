"""Models before DeepSpeed trains them: loading under ZeRO 3, and frozen models of every stage."""

import functools
import math
from typing import Optional

import deepspeed
import torch
from deepspeed.utils import safe_set_local_fp32_param
from transformers.initialization import no_init_weights

from trainer.distributed.host_offload import keep_on_host
from trainer.distributed.mesh import Meshes
from trainer.distributed.weight_slices import stretches
from trainer.model_folders import model_folder
from trainer.strategies.on_deepspeed import autotp

# These call their layers as often as their tokens need: an expert that is the identity, blocks of keys. Ranks would
# gather different weights, so each of these is gathered as a whole.
LEAVES = ("LongcatFlashExperts", "Qwen4ExpTextQSAIndexer")


def load_partitioned(
    folder: str,
    config,
    auto_class,
    options: dict,
    *,
    adapter: Optional[str] = None,
    engine_config: dict,
    dtype: torch.dtype,
    meshes: Meshes,
    device: torch.device,
) -> torch.nn.Module:
    """Build under zero.Init, so no rank holds the whole model. Each rank then reads its partitions from the folder.

    With hpZ, the first rank of each dp x sp group reads the parameters, one at a time (broadcast). `options` go to
    `auto_class.from_config`. `adapter` is the folder of an adapter whose update is added.
    """
    partitioned = deepspeed.zero.Init(
        config_dict_or_path=engine_config,
        data_parallel_group=meshes.loss.get_group(),
        zero_param_parallel_group=autotp.hpz_group(meshes),
    )
    build = functools.partial(auto_class.from_config, config, **options)
    # The module that defines the model must be imported before. zero.Init undoes what decorators did to the
    # __init__ of classes that are defined inside it. The next model of experts would then lack its config.
    with torch.device("meta"), no_init_weights():
        dtypes = {name: buffer.dtype for name, buffer in build(dtype=torch.float32).named_buffers()}
    with partitioned, no_init_weights():
        model = build(dtype=dtype)
    for module in model.modules():
        module._z3_leaf = type(module).__name__ in LEAVES
    model_folder.read_generation_config(model, folder)
    model.tie_weights(recompute_mapping=False)  # skipped by no_init_weights
    names = list(model_folder.stored_tensors(model))
    weights = model_folder.open_weights(model, folder, names, {}, adapter)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        for name in names:
            if name in buffers:
                buffers[name].copy_(weights.read(name))
                continue
            if parameters[name].ds_secondary_tensor is None:
                own = parameters[name].ds_tensor
                start = own.ds_numel * meshes.loss.get_local_rank()
                part = read_stretch(weights, name, parameters[name].ds_shape, start, own.ds_numel)
                own[: part.numel()].copy_(part)
                continue
            with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                if meshes.loss.get_local_rank() == 0:
                    parameters[name].copy_(weights.read(name))
    model_folder.restore_computed_buffers(model, device, dtypes)
    return model


def set_whole(parameter, tensor: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, which ZeRO 3 may have partitioned (then it communicates)."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(tensor)
        return
    with torch.no_grad(), deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(tensor)


def read_stretch(weights, name: str, shape, start: int, size: int) -> torch.Tensor:
    """Elements [start, start + size) of a flattened weight; fewer, if it ends before. Only these are read."""
    shape = tuple(shape) or (1,)
    boxes = stretches(min(start, math.prod(shape)), min(start + size, math.prod(shape)), shape)
    parts = [weights.read(name, tuple(slice(*bounds) for bounds in box)).flatten() for box in boxes]
    return torch.cat(parts) if parts else torch.empty(0)


def restore_partition(parameter, name: str, weights, meshes: Meshes, device: torch.device) -> None:
    """Set this rank's part of an fp32 master under ZeRO 3. DeepSpeed's setter fails if the last part is padded."""
    size = parameter.ds_tensor.ds_numel
    start = size * meshes.loss.get_local_rank()
    if autotp.is_sharded(parameter):
        full = autotp.local_part(parameter, weights.read(name).float(), meshes.root.get_local_rank("tp"))
        part = full.flatten()[start : start + size]
    else:
        part = read_stretch(weights, name, parameter.ds_shape, start, size)
    local = torch.zeros(size, device=device)
    local[: part.numel()] = part
    safe_set_local_fp32_param(parameter, local)


def prepare_frozen(
    model, config: dict, *, offload: bool, dtype: torch.dtype, device: torch.device, initialize
) -> torch.nn.Module:
    """A frozen model, ready to compute. `initialize` makes its engine from `config`, without an optimizer."""
    zero = config["zero_optimization"]
    if zero["stage"] < 3 and "tensor_parallel" not in config:
        for parameter in filter(torch.is_floating_point, model.parameters()):
            # not the RoPE tables: the trained model's are fp32
            parameter.data = parameter.data.to(dtype)
        model.eval()
        return keep_on_host(model, device) if offload else model.to(device=device)
    # without an optimizer ZeRO 1 and 2 have nothing to partition, and DeepSpeed refuses them
    zero["stage"] = 3 if zero["stage"] == 3 else 0
    if offload and zero["stage"] == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    engine = initialize(model=model, config=config)[0]
    engine.eval()  # an engine's eval() does not return the engine
    if offload and zero["stage"] < 3:
        keep_on_host(model, device)
    return engine

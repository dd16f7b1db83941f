"""The fp32 masters of parameters and their Adam states under DeepSpeed's ZeRO: flat partitions on each rank."""

from collections.abc import Iterator
from typing import NamedTuple

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

from trainer.checkpoints.shards import TensorShard, flat_shard, whole_shard
from trainer.model_folders import model_folder
from trainer.optimizers.adamw import state_tensors, states_of
from trainer.strategies.on_deepspeed.zero_0 import update_weights


def all_of(optimizer, zero_stage: int) -> list[torch.Tensor]:
    """The masters of this rank. Under ZeRO 1 to 3 they are flat."""
    if zero_stage == 0:
        return [master for group in optimizer.param_groups for master in group["params"]]
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer, which DeepSpeed uses for bf16 under ZeRO 1
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def tensors_of(model, optimizer, zero_stage: int) -> list[torch.Tensor]:
    """The weights of `model` and the states of `optimizer`. Either may be None. With both, the masters too."""
    tensors = []
    if optimizer is not None:
        tensors += state_tensors(optimizer if zero_stage == 0 else optimizer.optimizer)
    if model is not None:
        parameters = model_folder.unwrapped(model).parameters()
        tensors += [p.ds_tensor for p in parameters] if zero_stage == 3 else list(parameters)
    return tensors + (all_of(optimizer, zero_stage) if model is not None and optimizer is not None else [])


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole fp32 master of a parameter, or a frozen parameter or buffer itself (all-gather over dp x sp)."""
    master = vars(tensor).get("master")
    if master is None and tensor.requires_grad:
        master = safe_get_full_fp32_param(tensor)
    if master is not None:
        return master.detach()
    with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else []):
        return tensor.detach().clone() if hasattr(tensor, "ds_id") else tensor.detach()


def stage_2_part(parameter, optimizer) -> tuple:
    """(full shape, start of this rank's stretch, flat masters, place in them, size) of a parameter in ZeRO 1 and 2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return tuple(parameter.shape), 0, None, 0, 0
    flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    within = mapping.hp_fragment_address
    return tuple(parameter.shape), mapping.lp_fragment_address.start, flat, within.start, within.numel


def stage_3_part(parameter, optimizer) -> tuple:
    """The same in ZeRO 3. A parameter is partitioned into equal stretches, and the last ones are padded."""
    group, where, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    used = max(0, min(size, parameter.ds_numel - start))
    return tuple(parameter.ds_shape), start, optimizer.fp32_partitioned_groups_flat[group], where, used


def stretch_of(parameter, rank: int) -> tuple[int, int]:
    """(start, size) of a rank's part of a flattened parameter in ZeRO 3, without its padding. 0 if it has only padding.

    10 elements on 4 ranks: (0, 3), (3, 3), (6, 3) and (9, 1).
    """
    most = parameter.ds_tensor.ds_numel
    return most * rank, max(0, min(most, parameter.ds_numel - most * rank))


def _shards_of_master(name: str, adamw, shape, start: int, flat, where: int, size: int) -> Iterator[TensorShard]:
    """The shards of one parameter: `size` elements, at `where` in this rank's flat masters, at `start` in the whole."""
    if not size:
        return
    yield flat_shard(f"weight/{name}", shape, start, flat.narrow(0, where, size))
    for kind, state in states_of(adamw, flat).items():
        if state.ndim:
            yield flat_shard(f"{kind}/{name}", shape, start, state.narrow(0, where, size))
        else:  # the step count, the same in every part
            yield whole_shard(f"{kind}/{name}", state, is_written=start == 0)


class Part(NamedTuple):
    """Which part of partitioned tensors a rank holds."""

    zero_stage: int
    loss_rank: int  # its rank in dp x sp


def shards_of(name: str, tensor: torch.Tensor, parameter, optimizer, part: Part) -> Iterator[TensorShard]:
    """The shards of one stored tensor, as if this rank's tp part were the whole. `parameter` is None for a buffer."""
    is_first = part.loss_rank == 0
    if parameter is None or not parameter.requires_grad:
        yield _untrained_shard(name, tensor, parameter, part)
    elif part.zero_stage == 0:
        master = vars(parameter).get("master", parameter)
        yield whole_shard(f"weight/{name}", master, is_first)
        for kind, state in states_of(optimizer, master).items():
            yield whole_shard(f"{kind}/{name}", state, is_first)
    else:
        find = stage_3_part if part.zero_stage == 3 else stage_2_part
        yield from _shards_of_master(name, optimizer.optimizer, *find(parameter, optimizer))


def _untrained_shard(name: str, tensor: torch.Tensor, parameter, part: Part) -> TensorShard:
    """A buffer or a frozen parameter, which has no master."""
    if parameter is None or part.zero_stage < 3:
        return whole_shard(f"weight/{name}", tensor, part.loss_rank == 0)
    start, size = stretch_of(parameter, part.loss_rank)
    return flat_shard(f"weight/{name}", tuple(parameter.ds_shape), start, parameter.ds_tensor[:size])


def to_weights(model, optimizer, zero_stage: int) -> None:
    """Round loaded masters to the weights that the model computes with (all-gather over dp x sp)."""
    if zero_stage == 0:
        update_weights(model)
    elif zero_stage in (1, 2):
        optimizer.update_lp_params()
    elif zero_stage == 3:
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        kept = optimizer.persistent_parameters  # small ones stay gathered, and would keep their old values
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)
        optimizer.invalidate_secondary_tensor()  # hpZ gathers from copies, which would keep the old values


def loss_scale_of(optimizer) -> dict:
    """The state of the fp16 loss scaler."""
    scaler = optimizer.loss_scaler
    return {"scale": scaler.cur_scale, "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}


def set_loss_scale(optimizer, state: dict) -> None:
    """Restore the fp16 loss scaler. It uses only the iterations since the last overflow."""
    scaler = optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["scale"], state["good_steps"], -1

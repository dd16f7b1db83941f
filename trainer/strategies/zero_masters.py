"""Where DeepSpeed's ZeRO keeps the fp32 masters of its parameters, and Adam's states of them: flat partitions of each rank."""

from collections.abc import Iterator

import torch

from trainer.strategies import run_state
from trainer.strategies.checkpoint_pieces import Piece, flat_piece, whole_piece


def all_of(optimizer, zero_stage: int) -> list[torch.Tensor]:
    """The flat masters of this rank, under ZeRO 1 to 3."""
    if zero_stage == 3:
        return list(optimizer.fp32_partitioned_groups_flat)
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer, which DeepSpeed takes for bf16 under ZeRO 1
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a parameter, whole; of a frozen one or a buffer, itself (all-gather over dp x sp)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(tensor) if tensor.requires_grad else None
    if master is not None:
        return master.detach()
    with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else []):
        return tensor.detach().clone() if hasattr(tensor, "ds_id") else tensor.detach()


def stage_2_part(parameter, optimizer) -> tuple:
    """(full shape, start of this rank's stretch, flat masters, where in them, how many) of a parameter in ZeRO 1 and 2."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return tuple(parameter.shape), 0, None, 0, 0
    flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    within = mapping.hp_fragment_address
    return tuple(parameter.shape), mapping.lp_fragment_address.start, flat, within.start, within.numel


def stage_3_part(parameter, optimizer) -> tuple:
    """The same in ZeRO 3, where each parameter is cut into equal stretches, the last ones padded."""
    group, where, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = size * optimizer._get_param_partition_rank(parameter)
    used = max(0, min(size, parameter.ds_numel - start))
    return tuple(parameter.ds_shape), start, optimizer.fp32_partitioned_groups_flat[group], where, used


def pieces_of(name: str, adamw, shape, start: int, flat, where: int, size: int) -> Iterator[Piece]:
    """The pieces of one parameter, `size` elements at `where` of this rank's flat masters; those at `start` of it all."""
    if not size:
        return
    yield flat_piece(f"weight/{name}", shape, start, flat.narrow(0, where, size))
    for kind, state in run_state.states_of(adamw, flat).items():
        if state.ndim:
            yield flat_piece(f"{kind}/{name}", shape, start, state.narrow(0, where, size))
        else:  # the step count, the same in every part
            yield whole_piece(f"{kind}/{name}", state, is_written=start == 0)

"""DeepSpeed's weights in the dtype that a rollout engine or a model folder wants. Ranks cast them before they send them.

ZeRO 0 to 2 have the rounded weights on every rank of dp x sp, so only tp ranks send anything. Under ZeRO 3, each rank has
a stretch of every weight.
"""

from collections.abc import Iterator
from typing import Optional

import torch

from trainer.distributed.bucketed_gather import Piece, Sharding, gathered
from trainer.model_folders import model_folder
from trainer.model_folders.adapter_tensors import merge_adapter, merging_dtype
from trainer.strategies.on_deepspeed import autotp
from trainer.strategies.on_deepspeed.zero_masters import full, stage_3_part, stretch_of


def merged_weights(module, dtype: torch.dtype, tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor in `dtype`) of the plain model that an adapter makes (all-gathers over dp x sp and over tp).

    Only the matrices of an adapter are read from their masters, because merging needs fp32.
    """
    parameters = dict(module.named_parameters())

    def piece(name: str, tensor: torch.Tensor) -> Piece:
        tensor, wanted = parameters.get(name, tensor), merging_dtype(name, dtype)
        if ".lora_" in name:
            return Piece(name, full(tensor), wanted, _shardings_of_tp(tensor, tp_group))
        return _piece(name, tensor, wanted, tp_group, module.device)

    pieces = (piece(name, tensor) for name, tensor in model_folder.all_tensors(module).items())
    return merge_adapter(gathered(pieces), module, dtype)


def weights_to_save(strategy, engine, tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """As `iter_full_params`. Under ZeRO 3 without an adapter, ranks cast to the compute dtype before they send.

    The masters are saved, not the weights that the model computes with: an average may be in their place.
    """
    if strategy.zero_stage < 3 or model_folder.has_adapter(model_folder.unwrapped(engine)):
        yield from strategy.iter_full_params(engine)
        return
    parameters = dict(engine.module.named_parameters())
    for name, tensor in model_folder.stored_tensors(engine.module).items():
        tensor, master = parameters.get(name, tensor), None
        if tensor.requires_grad:
            _, _, masters, where, size = stage_3_part(tensor, engine.optimizer)
            master = masters.narrow(0, where, size)
        yield from gathered([_piece(name, tensor, strategy.param_dtype, tp_group, engine.device, master)])


def _piece(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, tp_group, device, master: Optional[torch.Tensor] = None
) -> Piece:
    """This rank's part of a parameter or buffer. `master` is the fp32 part to send instead of the rounded one."""
    part, shardings = tensor.detach(), _shardings_of_tp(tensor, tp_group)
    if hasattr(tensor, "ds_id"):  # partitioned by ZeRO 3
        group = tensor.ds_process_group
        sizes = tuple(stretch_of(tensor, rank)[1] for rank in range(group.size()))
        part = tensor.ds_tensor.detach().flatten()[: sizes[group.rank()]] if master is None else master
        part, shardings = part.to(device), [Sharding(0, sizes, group, tuple(tensor.ds_shape)), *shardings]
    return Piece(name, part, dtype if tensor.is_floating_point() else tensor.dtype, shardings)


def _shardings_of_tp(parameter, tp_group) -> list[Sharding]:
    partition = autotp.partition_of(parameter)
    return [] if partition is None else [Sharding(partition[0], tuple(partition[1]), tp_group)]

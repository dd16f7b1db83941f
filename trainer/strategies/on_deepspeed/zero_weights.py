"""DeepSpeed's weights in the dtype that a rollout engine or a model folder wants: cast first, then sent and joined.

ZeRO 0 to 2 have the rounded weights on every rank of dp x sp, so only tp ranks send anything. Under ZeRO 3, each rank has
a stretch of every weight.
"""

from collections.abc import Iterator

import torch

from trainer.distributed.bucketed_gather import Cut, Piece, gathered
from trainer.model_folders import model_folder
from trainer.model_folders.adapter_tensors import merge_adapter, merging_dtype
from trainer.strategies.on_deepspeed import autotp
from trainer.strategies.on_deepspeed.zero_masters import full, stage_3_part


def merged_weights(module, dtype: torch.dtype, zero_stage: int, tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor in `dtype`) of the plain model that an adapter makes (all-gathers over dp x sp and over tp).

    Only the matrices of an adapter are read from their masters, because merging needs fp32.
    """
    parameters = dict(module.named_parameters())

    def piece(name: str, tensor: torch.Tensor) -> Piece:
        tensor, cuts = parameters.get(name, tensor), []
        wanted = merging_dtype(name, dtype) if tensor.is_floating_point() else tensor.dtype
        part = tensor.detach()
        if ".lora_" in name:
            part = full(tensor)
        elif zero_stage == 3 and hasattr(tensor, "ds_id"):
            part, cut = _stretch(tensor)
            part, cuts = part.to(module.device), [cut]
        return Piece(name, part, wanted, cuts + _cut_by_tp(tensor, tp_group))

    pieces = (piece(name, tensor) for name, tensor in model_folder.all_tensors(module).items())
    return merge_adapter(gathered(pieces), module, dtype)


def weights_to_save(strategy, engine, tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """As `iter_full_params`. Under ZeRO 3 without an adapter, ranks cast to the compute dtype before they send.

    The masters count, not the weights that the model computes with: an average may be in their place.
    """
    if strategy.zero_stage < 3 or model_folder.has_adapter(model_folder.unwrapped(engine)):
        yield from strategy.iter_full_params(engine)
        return
    parameters = dict(engine.module.named_parameters())
    for name, tensor in model_folder.stored_tensors(engine.module).items():
        tensor, cuts = parameters.get(name, tensor), []
        part, dtype = tensor.detach(), strategy.param_dtype if tensor.is_floating_point() else tensor.dtype
        if hasattr(tensor, "ds_id"):
            part, cut = _stretch(tensor)
            cuts = [cut]
            if tensor.requires_grad:
                _, _, masters, where, size = stage_3_part(tensor, engine.optimizer)
                part = masters.narrow(0, where, size)
            part = part.to(engine.device)
        yield from gathered([Piece(name, part, dtype, cuts + _cut_by_tp(tensor, tp_group))])


def _stretch(parameter) -> tuple[torch.Tensor, Cut]:
    """This rank's stretch of a flattened parameter under ZeRO 3. All are equal, but the last ones are padded, or empty."""
    most, group = parameter.ds_tensor.ds_numel, parameter.ds_process_group
    sizes = tuple(max(0, min(most, parameter.ds_numel - most * rank)) for rank in range(group.size()))
    part = parameter.ds_tensor.detach().flatten()[: sizes[group.rank()]]
    return part, Cut(0, sizes, group, tuple(parameter.ds_shape))


def _cut_by_tp(parameter, tp_group) -> list[Cut]:
    partition = autotp.partition_of(parameter)
    return [] if partition is None else [Cut(partition[0], tuple(partition[1]), tp_group)]

"""The weights that DeepSpeed's model computes with, whole and for a rollout engine: its masters, rounded, from all ranks.

ZeRO 0 to 2 have the rounded weights on every rank of dp x sp, so only tp ranks send anything. Under ZeRO 3, each rank has
a stretch of every weight. Only the matrices of an adapter are read from their masters, because merging needs fp32.
"""

from collections.abc import Iterator

import torch

from trainer.checkpoints import model_folder
from trainer.checkpoints.adapter_tensors import merge_adapter, merging_dtype
from trainer.distributed.bucketed_gather import Cut, Piece, gathered
from trainer.strategies import autotp
from trainer.strategies.zero_masters import full


def merged_weights(module, dtype: torch.dtype, zero_stage: int, tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor in `dtype`) of the plain model that an adapter makes (all-gathers over dp x sp and over tp)."""
    parameters = dict(module.named_parameters())

    def piece(name: str, tensor: torch.Tensor) -> Piece:
        tensor, cuts = parameters.get(name, tensor), []
        wanted = merging_dtype(name, dtype) if tensor.is_floating_point() else tensor.dtype
        part = tensor.detach()
        if ".lora_" in name:
            part = full(tensor)
        elif zero_stage == 3 and hasattr(tensor, "ds_id"):
            part, count = tensor.ds_tensor.detach().flatten(), tensor.ds_process_group.size()
            most = tensor.ds_tensor.ds_numel  # the last stretches are padded, or empty
            sizes = tuple(max(0, min(most, tensor.ds_numel - most * rank)) for rank in range(count))
            part = part.to(module.device)[: sizes[tensor.ds_process_group.rank()]]
            cuts.append(Cut(0, sizes, tensor.ds_process_group, tuple(tensor.ds_shape)))
        partition = autotp.partition_of(tensor)
        if partition is not None:
            cuts.append(Cut(partition[0], tuple(partition[1]), tp_group))
        return Piece(name, part, wanted, cuts)

    pieces = (piece(name, tensor) for name, tensor in model_folder.all_tensors(module).items())
    return merge_adapter(gathered(pieces), module, dtype)

"""DeepSpeed's AutoTP on our mesh: its configuration from a tensor-parallel plan, and full tensors from its shards.

AutoTP cuts linear layers in place. It keeps the vocabulary head and a tied embedding sharded. It sums the gradients of
weights that are replicated but see only this rank's heads (Qwen3's q_norm, k_norm).
"""

import dataclasses
import re
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.checkpoints.shards import TensorShard

# style of a plan -> AutoTP's partition type
PARTITION_TYPES = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "colwise_rep": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
# AutoTP does these without an entry: its vocab_parallel_lm_head is for the head and its tied embedding
IMPLIED = ("colwise_vocab", "embedding_rowwise", "replicated", "replicated_in_block", "block_input")


def validate_vocabulary(config, tp: int) -> None:
    """Raises UserError unless `tp` divides the vocabulary. AutoTP and DTensor cut an uneven one at different places."""
    vocab_size = config.get_text_config().vocab_size
    if vocab_size % tp:
        fits = [str(size) for size in range(1, 65) if vocab_size % size == 0]
        raise UserError(
            "--tensor_parallel_size", f"{tp} does not divide the vocabulary of {vocab_size}", ", ".join(fits)
        )


def tensor_parallel_config(plan: dict[str, str], tp_size: int) -> dict:
    """DeepSpeed's "tensor_parallel" section for a complete plan {"model.layers.*.mlp.up_proj": "colwise", ...}.

    Raises UserError for a style without a counterpart in AutoTP.
    """
    specs = []
    for pattern, style in plan.items():
        if style in IMPLIED:
            continue
        if style not in PARTITION_TYPES:
            known = ", ".join([*PARTITION_TYPES, *IMPLIED])
            raise UserError("--tensor_parallel_size", f"the plan gives {pattern} the style {style}", known)
        # the * in a plan is one name between dots; biases follow their weights
        regex = re.escape(pattern).replace(r"\*", r"[^.]+") + r"\.weight$"
        specs.append({"patterns": [regex], **PARTITION_TYPES[style]})
    return {
        "autotp_size": tp_size,
        "vocab_parallel_lm_head": "colwise_vocab" in plan.values(),  # a reward model has no such head
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def use_mesh_groups(meshes) -> None:
    """Give DeepSpeed the groups of our mesh. Otherwise, it builds its own, once per process."""
    from deepspeed.utils import groups

    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = meshes.root["tp"].get_group()
    groups._DATA_PARALLEL_GROUP = meshes.loss.get_group()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = hpz_group(meshes)


def hpz_group(meshes) -> dist.ProcessGroup | None:
    """The ranks that hold one full set of weights under ZeRO++ hpZ (dp_shard x sp); None without dp_replicate."""
    return meshes.params["fsdp"].get_group() if meshes.params["dp_replicate"].size() > 1 else None


def return_sharded_logits(model: torch.nn.Module, tp_mesh) -> None:
    """Make the vocabulary head return its part of the logits as a DTensor. The loss of tensor parallelism needs it."""
    from deepspeed.module_inject.layers import VocabParallelLinear

    for module in model.modules():
        if isinstance(module, VocabParallelLinear):
            module.register_forward_hook(
                lambda head, _, logits: DTensor.from_local(
                    logits,
                    tp_mesh,
                    [Shard(logits.ndim - 1)],
                    run_check=False,
                    shape=(*logits.shape[:-1], head.vocab_size),
                    stride=(logits.shape[1] * head.vocab_size, head.vocab_size, 1),
                )
            )


def _partition(parameter: torch.nn.Parameter) -> tuple[int, list[int]] | None:
    """(dimension, size of each rank's part) of a parameter that AutoTP cut; None for a replicated one."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    if meta is None or meta["replicated"] or meta["partition_dim"] is None:
        return None
    return meta["partition_dim"], list(meta["partition_sizes"])


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    return _partition(parameter) is not None


def gather(parameter: torch.nn.Parameter, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The full tensor from each tp rank's `part`: a weight, gradient or state of `parameter` (all-gather over tp)."""
    partition = _partition(parameter)
    if partition is None:
        return part
    dim, sizes = partition
    shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
    parts = [part.new_empty(shape) for shape in shapes]
    if len(set(sizes)) == 1:
        dist.all_gather(parts, part.contiguous(), group=group)
    else:
        for rank, other in enumerate(parts):
            other.copy_(part) if rank == dist.get_rank(group) else None
            dist.broadcast(other, group_src=rank, group=group)
    return torch.cat(parts, dim=dim)


def local_part(parameter: torch.nn.Parameter, full: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """This tp rank's part of a full tensor of `parameter`."""
    partition = _partition(parameter)
    return full if partition is None else full.split(partition[1], dim=partition[0])[tp_rank]


def place(shard: "TensorShard", parameter: torch.nn.Parameter | None, tp_rank: int) -> "TensorShard":
    """Turn a shard of this tp rank's part of a parameter into a shard of the whole. Tp rank 0 writes replicas."""
    partition = None if parameter is None else _partition(parameter)
    if partition is None or shard.key.startswith("step/"):
        return dataclasses.replace(shard, is_written=shard.is_written and tp_rank == 0)
    dim, sizes = partition
    full_shape, offset = list(shard.full_shape), list(shard.offset)
    full_shape[dim], offset[dim] = sum(sizes), sum(sizes[:tp_rank])
    return dataclasses.replace(shard, full_shape=tuple(full_shape), offset=tuple(offset))

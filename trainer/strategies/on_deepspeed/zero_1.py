"""ZeRO 1 in bf16: each rank gets the sum of its own part of the gradients, by one reduce-scatter in a step.

DeepSpeed's BF16_Optimizer keeps all fp32 gradients on every rank and all-reduces them, which sends twice the bytes.
"""

import torch
import torch.distributed as dist

from trainer.strategies.options import bucket_elements


def reduce_own_parts(optimizer, reduce_dtype: torch.dtype) -> None:
    """Let a BF16_Optimizer reduce, clip and take the norm of parts. Other optimizers stay: fp16 and offload have them."""
    if not hasattr(optimizer, "get_grads_for_reduction"):
        return
    whole, own = optimizer.fp32_groups_gradients_flat, optimizer.fp32_groups_gradient_flat_partition
    group, norms = optimizer.dp_process_group, optimizer.get_grads_for_norm
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    @torch.no_grad()
    def reduced() -> tuple[list, dict]:
        for number, gradients in enumerate(whole):
            for columns in gradients.view(size, -1).split(bucket_elements(gradients.numel()) // size, dim=1):
                mean = torch.empty_like(columns[rank], dtype=reduce_dtype)
                dist.reduce_scatter_single(mean, columns.to(reduce_dtype).flatten(), group=group)
                columns.zero_()
                columns[rank].copy_(mean).div_(size)
            # a parameter without a gradient here may have one on another rank
            optimizer.fp32_groups_has_gradients[number] = [True] * len(optimizer.bf16_groups[number])
        return [], {}  # nothing is left for the engine to reduce

    def for_norm(for_clipping: bool = False):
        if for_clipping:
            return own
        tensors, experts = norms()  # outside this rank's part they are zero
        total = torch.stack([tensor.norm() for tensor in tensors]).square().sum()
        dist.all_reduce(total, group=group)
        return [total.sqrt()], experts

    if size > 1:
        optimizer.get_grads_for_reduction, optimizer.get_grads_for_norm = reduced, for_norm

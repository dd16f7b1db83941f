"""Gradients under ZeRO 1 and 2, with fewer bytes or waits than in DeepSpeed's own optimizers."""

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import has_inf_or_nan

from trainer.strategies.options import bucket_elements


def reduce_own_parts(optimizer, reduce_dtype: torch.dtype) -> None:
    """Let a BF16_Optimizer reduce, clip and take the norm of parts. Other optimizers stay: fp16 and offload have them.

    Each rank gets the sum of its own part, by one reduce-scatter in a step. DeepSpeed keeps all fp32 gradients on every
    rank and all-reduces them, which sends twice the bytes.
    """
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


def read_together(optimizer) -> None:
    """Let an offloading optimizer of ZeRO 1 or 2 wait for its GPU a fixed number of times in a step.

    The host reads what it needs of all gradients at once. DeepSpeed waits twice for each parameter.
    `update_offload_overflow_tracker` asks whether its gradient is finite. `complete_grad_norm_calculation_for_cpu_offload`
    reads its norm. The numbers stay the same.
    """
    complete = optimizer.complete_grad_norm_calculation_for_cpu_offload

    def track(grad) -> None:
        if grad is not None:
            optimizer.local_overflow = has_inf_or_nan(grad.data) | optimizer.local_overflow

    def completed(params) -> torch.Tensor:
        norms = {key: norm for key, norm in optimizer.norm_for_param_grads.items() if norm.device.type != "cpu"}
        if norms:
            optimizer.norm_for_param_grads.update(zip(norms, torch.stack(list(norms.values())).cpu().unbind()))
        return complete(params)

    optimizer.update_offload_overflow_tracker = track
    optimizer.complete_grad_norm_calculation_for_cpu_offload = completed

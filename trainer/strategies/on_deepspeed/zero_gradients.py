"""Gradients under ZeRO, in other ways than in DeepSpeed's own optimizers.

ZeRO 1 and 2 need fewer bytes or waits. With --exact, DeepSpeed gets complete gradients: it neither collects,
reduces, scales nor clips them.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import has_inf_or_nan

from trainer.strategies.options import bucket_elements


def reduce_own_parts(optimizer, reduce_dtype: torch.dtype) -> None:
    """Let a BF16_Optimizer reduce, clip and take the norm of parts. Other optimizers stay: those of fp16 and offload reduce parts already.

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


@contextlib.contextmanager
def only_autograd(engine) -> Iterator[None]:
    """Inside, torch.autograd.grad may run through the engine's model, and nothing is reduced after it.

    It is `engine.backward` without its epilogue, which would reduce.
    """
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward = False
        if engine.zero_optimization():
            engine.optimizer.exit_backward()


def without_leaf_hooks(optimizer) -> None:
    """Remove the hooks by which ZeRO 3 reduces the gradients of experts. They may not run inside `only_autograd`."""
    for hook in getattr(optimizer, "_leaf_module_hooks", ()):
        hook.remove()


@torch.no_grad()
def set_gradients(engine, grads: dict[str, torch.Tensor], stage: int, are_parts: bool = False) -> None:
    """Give the engine fp32 gradients by name for its next `step`: whole and equal on all ranks, or its own parts."""
    of_parameter = {parameter: grads[name] for name, parameter in engine.module.named_parameters() if name in grads}
    engine.set_gradient_accumulation_boundary(True)
    optimizer = engine.optimizer
    if stage == 0:
        for parameter, grad in of_parameter.items():
            parameter.grad = grad
    elif stage == 3:
        for number, group in enumerate(optimizer.fp16_groups):
            places = [0 if are_parts else optimizer._get_param_partition_rank(p) for p in group]
            parts = [_part(of_parameter[p], p.partition_numel(), at) for p, at in zip(group, places)]
            optimizer.averaged_gradients[number] = parts
    else:
        device = next(iter(grads.values())).device
        for number, parameters in enumerate(optimizer.params_in_partition):
            optimizer.all_grad_tensors[number] = [of_parameter[parameter] for parameter in parameters]
            where = optimizer.first_offset[number], optimizer.partition_size[number], torch.float32, device, number
            flat = optimizer.get_flat_partition(parameters, *where, return_tensor_list=True)
            optimizer.averaged_gradients[number], optimizer.all_grad_tensors[number] = flat, None


def _part(grad: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return stretch `rank` of `size` elements, with zeros after the end of the gradient."""
    part, found = grad.new_zeros(size), grad.flatten()[size * rank : size * (rank + 1)]
    part[: found.numel()] = found
    return part

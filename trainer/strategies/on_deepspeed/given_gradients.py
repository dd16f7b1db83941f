"""Gradients that DeepSpeed gets complete, with --exact: it neither collects, reduces, scales nor clips them."""

import contextlib
from collections.abc import Iterator

import torch


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

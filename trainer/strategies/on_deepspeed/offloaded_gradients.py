"""ZeRO 1 and 2 with --adam_offload: the host reads what it needs of all gradients at once, not of one parameter at a time."""

import torch
from deepspeed.runtime.utils import has_inf_or_nan


def read_together(optimizer) -> None:
    """Let an offloading optimizer of ZeRO 1 or 2 wait for its GPU a fixed number of times in a step.

    DeepSpeed waits twice for each parameter: `update_offload_overflow_tracker` asks whether its gradient is finite, and
    `complete_grad_norm_calculation_for_cpu_offload` reads its norm. The numbers stay the same.
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

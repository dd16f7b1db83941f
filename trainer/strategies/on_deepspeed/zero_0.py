"""What DeepSpeed lacks under ZeRO 0: fp32 masters of low-precision weights, and clipping over tp.

Every rank holds all masters. The model computes as under ZeRO 1 to 3. In the backward pass, a hook adds the gradient
of a weight to the fp32 gradient of its master. The engine reduces these, and the optimizer steps on the masters.
"""

import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from trainer.distributed.gradient_norm import clip_grad_by_total_norm_, get_grad_norm
from trainer.optimizers.adamw import use_parameters
from trainer.strategies.on_deepspeed import autotp


def add_masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Cast the parameters of `model` to `dtype`. Give each trained one a fp32 `master`, and the optimizer the masters."""
    masters = {}
    for parameter in filter(torch.is_floating_point, model.parameters()):
        if parameter.requires_grad:
            masters[parameter] = parameter.master = torch.nn.Parameter(parameter.detach().float().clone())
            if hasattr(parameter, DS_AUTOTP_UC_META):  # how tp shards it
                setattr(parameter.master, DS_AUTOTP_UC_META, getattr(parameter, DS_AUTOTP_UC_META))
            parameter.register_post_accumulate_grad_hook(_add_to_master)
        parameter.data = parameter.data.to(dtype)
    use_parameters(optimizer, masters)
    # the name of the method of DeepSpeed's BF16_Optimizer; the engine reduces what it returns
    optimizer.get_grads_for_reduction = lambda: (_gradients(masters.values()), {})
    optimizer.register_step_post_hook(lambda *_: update_weights(model))


def _add_to_master(parameter: torch.nn.Parameter) -> None:
    master, grad, parameter.grad = parameter.master, parameter.grad, None
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad += grad


def _gradients(masters) -> list[torch.Tensor]:
    """The gradients of all masters. All ranks must reduce the same list, so a gradient that never came is zero."""
    for master in masters:
        if master.grad is None:
            master.grad = torch.zeros_like(master)
    return [master.grad for master in masters]


@torch.no_grad()
def update_weights(model: torch.nn.Module) -> None:
    """Round the masters to the weights that the model computes with."""
    for parameter in model.parameters():
        if "master" in vars(parameter):
            parameter.copy_(parameter.master)


def optimizer_step(optimizer, engine, scheduler, max_norm: float, tp_group) -> float:
    """Clip, step, schedule, zero. Returns the gradient norm before clipping. If it is not finite, nothing steps."""
    trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
    parameters = [vars(parameter).get("master", parameter) for parameter in trained]
    norm = get_grad_norm(parameters, lambda p: (tp_group,) if autotp.is_sharded(p) else ())
    if torch.isfinite(norm):
        clip_grad_by_total_norm_(parameters, max_norm, norm)
        engine.step()
        scheduler.step()
    optimizer.zero_grad()
    return norm.item()

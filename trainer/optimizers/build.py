"""Build the optimizer that --optim names, and the learning-rate schedule that --lr_scheduler names."""

import math
from collections.abc import Callable
from typing import Optional

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from trainer.errors import UserError
from trainer.optimizers.adafactor import build_adafactor
from trainer.optimizers.adamw import decay_groups
from trainer.optimizers.adamw_8bit import build_adamw_8bit
from trainer.optimizers.muon import build_muon


def build_optimizer(
    name: str,
    model: torch.nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    num_dims=lambda parameter: parameter.ndim,
) -> torch.optim.Optimizer:
    """Build the optimizer that --optim names, over the parameters of `model`. They may still be on the meta device.

    Raises:
        UserError: the optimizer does not fit the model or the other flags.
    """
    if name == "adamw":
        groups = decay_groups(model.named_parameters(), weight_decay, num_dims)
        return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)
    if name == "adafactor":
        return build_adafactor(model, lr=lr, weight_decay=weight_decay)
    build = build_muon if name == "muon" else build_adamw_8bit
    return build(model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def has_min_lr(name: str) -> bool:
    return name.endswith("with_min_lr") or name == "warmup_stable_decay"


def build_scheduler(
    name: str,
    optimizer,
    *,
    total_steps: int,
    warmup_ratio: float,
    min_lr_ratio: float,
    warmup_steps: Optional[int] = None,
):
    """Build the scheduler of `transformers.get_scheduler`, with n = `warmup_steps` warm-up steps.

    None means ceil(warmup_ratio * total_steps).

    Step i of the warm-up, counted from 1, has i / (n + 1) of the peak. transformers begins at 0, which wastes a step.
    Raises UserError for a schedule whose rates are 0 in every step.
    """
    if name == "constant":
        warmup_steps = 0
    elif warmup_steps is None:
        warmup_steps = math.ceil(warmup_ratio * total_steps)
    specific = {}
    if name == "warmup_stable_decay":  # decays over the last tenth of the run
        specific.update(num_decay_steps=math.ceil(total_steps / 10), min_lr_ratio=min_lr_ratio)
    elif has_min_lr(name):
        specific["min_lr_rate"] = min_lr_ratio
    # polynomial divides by the number of steps after the warm-up
    numbers = {"num_warmup_steps": warmup_steps, "num_training_steps": max(total_steps, warmup_steps + 1)}
    try:
        scheduler = get_scheduler(name, optimizer, **numbers, scheduler_specific_kwargs=specific)
    except ValueError as error:  # polynomial: a peak below its end of 1e-7
        raise UserError("--lr_scheduler", f"{name}: {error}") from None
    shares = [_warmed_up(share, warmup_steps) for share in scheduler.lr_lambdas]
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    if not any(peak * share(step) for peak, share in zip(peaks, shares) for step in range(total_steps)):
        found = f"{name} has a rate of 0 in every step of {total_steps}, so nothing would train"
        raise UserError("--lr_scheduler", found, "another schedule, or more steps")
    return LambdaLR(optimizer, shares)


def check_rates(name: str, learning_rate: float, total_steps: int, **ends) -> None:
    """Raise UserError for a schedule whose rates are 0 in every step. `ends` are those of `build_scheduler`."""
    build_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=learning_rate), total_steps=total_steps, **ends)


def _warmed_up(share: Callable[[int], float], warmup_steps: int) -> Callable[[int], float]:
    """The share of the peak at a step, counted from 0. The warm-up of `share` is replaced."""
    return lambda step: (step + 1) / (warmup_steps + 1) if step < warmup_steps else share(step)

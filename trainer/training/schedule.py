"""Learning-rate schedules by the names that transformers knows."""

import math

from trainer.errors import UserError

# these need more than the step number: a metric of the run, or the gradients
UNSUPPORTED = {"reduce_lr_on_plateau", "greedy"}


def check_scheduler_name(name: str) -> None:
    from transformers import SchedulerType

    names = sorted(kind.value for kind in SchedulerType if kind.value not in UNSUPPORTED)
    if name not in names:
        raise UserError("--lr_scheduler", name, ", ".join(names))


def has_min_lr(name: str) -> bool:
    return name.endswith("with_min_lr") or name == "warmup_stable_decay"


def build_scheduler(name: str, optimizer, *, total_steps: int, warmup_ratio: float, min_lr_ratio: float):
    """The scheduler of `transformers.get_scheduler`, with ceil(warmup_ratio * total_steps) warm-up steps."""
    from transformers import get_scheduler

    warmup_steps = math.ceil(warmup_ratio * total_steps)
    specific = {}
    if name == "warmup_stable_decay":  # decays over the last tenth of the run
        specific.update(num_decay_steps=math.ceil(total_steps / 10), min_lr_ratio=min_lr_ratio)
    elif has_min_lr(name):
        specific["min_lr_rate"] = min_lr_ratio
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=specific,
    )

"""`--layout auto`: the first layout that `plan` finds for this model on these ranks."""

import dataclasses
import os
from collections.abc import Callable

import torch

from trainer.distributed.collectives import from_rank_0
from trainer.errors import UserError
from trainer.planning import layout_plan
from trainer.planning.plan_inputs import GB, Machine, Work, machine_of

CPU_RESERVE = 1.0  # GB of host memory for the libraries of a rank


def choose_layout(pretrain: str, work: Work, device: torch.device, check: Callable) -> tuple[dict, str]:
    """Return (the flags of the layout, a line for the user). Rank 0 chooses and broadcasts to all ranks.

    `check(flags)` raises UserError if the other flags of the run rule out these flags of a layout.

    Raises:
        UserError: no layout fits, or `pretrain` is no model.
    """

    def look() -> tuple[dict, str]:
        return first_choice(layout_plan.meta_model(pretrain, "--pretrain"), machine_of_ranks(device), work, check)

    return from_rank_0(look)


def first_choice(model, machine: Machine, work: Work, check: Callable) -> tuple[dict, str]:
    """The flags of the quickest layout that fits and passes `check`, and a line for the user."""
    choices = []
    for choice in layout_plan.make_plan(model, machine, work):
        flags = layout_plan.layout_flags(choice.layout)
        if choice.problem:
            choices.append(choice)
            continue
        try:
            check(flags)
        except UserError as error:
            choices.append(dataclasses.replace(choice, problem=str(error)))
            continue
        sizes = [f"{size / GB:.3g}" for size in (choice.needs.gpu, machine.room, choice.sent)]
        line = "--layout auto: {}: {} GB on each rank, which has {}; {} GB sent a step. The flags: {}"
        return flags, line.format(layout_plan.describe(choice.layout), *sizes, layout_plan.as_text(choice.layout))
    nearest = min(choices, key=lambda choice: choice.needs.gpu)
    found = f"auto: no layout fits; the smallest, {layout_plan.describe(nearest.layout)}: {nearest.problem}"
    raise UserError("--layout", found, "more ranks, a smaller --micro_train_batch_size or --max_len, or LoRA")


def machine_of_ranks(device: torch.device) -> Machine:
    """The machine that torchrun runs on, with the rates that `plan` assumes. On CPU, ranks share the host's memory."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    sizes = {"nodes": ranks // local, "host_memory": host}
    if device.type == "cuda":
        per_gpu = torch.cuda.get_device_properties(device).total_memory / GB
        sharing = -(-local // torch.cuda.device_count())  # ranks on one GPU
        return machine_of(ranks, gpu_memory=per_gpu / sharing, **sizes)
    return machine_of(ranks, gpu_memory=host / local, reserve=CPU_RESERVE, **sizes)

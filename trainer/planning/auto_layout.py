"""`--layout auto`: take the first layout that `plan` finds for this model on these ranks, and say so."""

import dataclasses
import os
from collections.abc import Callable

import torch

from trainer.distributed import mesh
from trainer.distributed.collectives import broadcast_object
from trainer.errors import UserError
from trainer.flags.preference_flags import DPOArguments, PreferenceDataArguments
from trainer.planning import layout_plan

CPU_RESERVE = 1.0  # GB of host memory for the libraries of a rank


def choose_layout(args, is_demo: bool, check: Callable) -> str:
    """Set the flags of the layout in `args` (broadcast over all ranks: rank 0 chooses). Returns a line for the user.

    `check(args)` raises UserError for flags that do not go together.

    Raises:
        UserError: a flag asks for a part of a layout, or no layout fits.
    """
    defaults = vars(type(args)())
    for name in layout_plan.layout_flags(layout_plan.Layout("", 0)):
        if vars(args)[name] != defaults[name]:
            raise UserError("--layout", f"auto with --{name} {vars(args)[name]}", "one of them")
    if is_demo:
        raise UserError("--layout", "auto with the demo", "--pretrain and --dataset")
    if args.load_in_4bit:
        raise UserError("--layout", "auto with --load_in_4bit", "one of them")
    device = mesh.resolve_device(args.device)
    mesh.start_process_group(device, args.dist_backend, host_tensors=device.type == "cuda")  # the layout may offload
    found = None
    if int(os.environ.get("RANK", 0)) == 0:
        try:
            found = _first_choice(args, machine_of_ranks(device), check)
        except UserError as error:
            found = error
    found = broadcast_object(found)
    if isinstance(found, UserError):
        raise found
    flags, line = found
    vars(args).update(flags, layout="flags")  # so config.yaml repeats this very run
    return line


def _first_choice(args, machine: layout_plan.Machine, check: Callable) -> tuple[dict, str]:
    """The flags of the quickest layout that fits and that the other flags allow, and a line for the user."""
    choices, model = [], layout_plan.meta_model(args.pretrain, "--pretrain")
    for choice in layout_plan.make_plan(model, machine, work_of(args)):
        flags = layout_plan.layout_flags(choice.layout)
        if choice.problem or (flags["gradient_checkpointing"] and args.selective_checkpointing):
            choices.append(choice)
            continue
        try:  # other flags may rule this layout out
            check(dataclasses.replace(args, **flags))
        except UserError as error:
            choices.append(dataclasses.replace(choice, problem=str(error)))
            continue
        sizes = [f"{size / layout_plan.GB:.3g}" for size in (choice.needs.gpu, machine.room, choice.sent)]
        line = "--layout auto: {}: {} GB on each rank, which has {}; {} GB sent a step. The flags: {}"
        return flags, line.format(layout_plan.describe(choice.layout), *sizes, layout_plan.as_text(choice.layout))
    nearest = min(choices, key=lambda choice: choice.needs.gpu)
    found = f"auto: no layout fits; the smallest, {layout_plan.describe(nearest.layout)}: {nearest.problem}"
    raise UserError("--layout", found, "more ranks, a smaller --micro_train_batch_size or --max_len, or LoRA")


def machine_of_ranks(device: torch.device) -> layout_plan.Machine:
    """The machine that torchrun runs on, with the rates that `plan` assumes. On CPU, ranks share the host's memory."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / layout_plan.GB
    flags = ["", "--gpus", str(ranks), "--nodes", str(ranks // local), "--host_memory", str(host)]
    if device.type == "cuda":
        per_gpu = torch.cuda.get_device_properties(device).total_memory / layout_plan.GB
        sharing = -(-local // torch.cuda.device_count())  # ranks on one GPU
        flags += ["--gpu_memory", str(per_gpu / sharing)]
    else:
        flags += ["--gpu_memory", str(host / local), "--reserve", str(CPU_RESERVE)]
    return layout_plan.machine_of(layout_plan.build_parser().parse_args(flags))


def work_of(args) -> layout_plan.Work:
    """What a step of this run trains. A pair of answers has two sequences."""
    sequences = 2 if isinstance(args, PreferenceDataArguments) else 1
    tokens = args.max_tokens_per_micro_batch
    micro = -(-tokens // (args.max_len * sequences)) if tokens else args.micro_train_batch_size
    return layout_plan.Work(
        samples=args.train_batch_size,
        micro=micro,
        max_len=args.max_len * sequences,
        by_tokens=bool(tokens),
        dtype=args.param_dtype,
        has_frozen_copy=isinstance(args, DPOArguments) and not args.lora_rank,
    )

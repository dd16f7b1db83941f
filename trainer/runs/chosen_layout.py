"""`--layout auto` in a run: which flags leave the layout open, and what a step of the run trains."""

import dataclasses
from collections.abc import Callable

import torch.distributed as dist

from trainer.distributed import mesh
from trainer.errors import UserError
from trainer.flags.preference_flags import DPOArguments, PreferenceDataArguments
from trainer.planning.auto_layout import choose_layout
from trainer.planning.layout_plan import Layout, Work, layout_flags


def set_layout(args, is_demo: bool, check: Callable) -> None:
    """Set the flags of the layout in `args`, and print them. Rank 0 chooses and broadcasts.

    `check(args)` raises UserError for flags that do not go together.

    Raises:
        UserError: a flag already sets a part of the layout, or no layout fits.
    """
    defaults = vars(type(args)())
    for name in layout_flags(Layout("", 0)):
        if vars(args)[name] != defaults[name]:
            raise UserError("--layout", f"auto with --{name} {vars(args)[name]}", "one of them")
    if is_demo:
        raise UserError("--layout", "auto with the demo", "--pretrain and --dataset")
    if args.load_in_4bit:
        raise UserError("--layout", "auto with --load_in_4bit", "one of them")
    device = mesh.resolve_device(args.device)
    mesh.start_process_group(device, host_tensors=device.type == "cuda")  # the layout may offload
    flags, line = choose_layout(args.pretrain, work_of(args), device, lambda flags: check_layout(args, flags, check))
    vars(args).update(flags, layout="flags")  # so config.yaml repeats this very run
    if dist.get_rank() == 0:
        print(line, flush=True)


def check_layout(args, flags: dict, check: Callable) -> None:
    """Raise UserError if the other flags of a run rule out these flags of a layout."""
    if flags["gradient_checkpointing"] and args.selective_checkpointing:
        raise UserError("--gradient_checkpointing", "with --selective_checkpointing", "one of them")
    check(dataclasses.replace(args, **flags))


def work_of(args) -> Work:
    """What a step of this run trains. A pair of answers has two sequences."""
    sequences = 2 if isinstance(args, PreferenceDataArguments) else 1
    tokens = args.max_tokens_per_micro_batch
    micro = -(-tokens // (args.max_len * sequences)) if tokens else args.micro_train_batch_size
    return Work(
        samples=args.train_batch_size,
        micro=micro,
        max_len=args.max_len * sequences,
        by_tokens=bool(tokens),
        dtype=args.param_dtype,
        has_frozen_copy=isinstance(args, DPOArguments) and not args.lora_rank,
    )

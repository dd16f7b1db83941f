"""`--layout auto` in a run: what a step of the run trains, and which flags of a layout go with the other flags."""

import functools

import torch.distributed as dist

from trainer.distributed import mesh
from trainer.flags.parse_flags import with_flags
from trainer.flags.rules import refuse
from trainer.planning.auto_layout import choose_layout
from trainer.planning.plan_inputs import Work
from trainer.runs.run_setup import choose_attention, strategy_of


def with_layout(args, command: str, *, sequences: int, has_frozen_copy: bool):
    """`args` with the flags of the chosen layout, which config.yaml then repeats. Rank 0 chooses and broadcasts.

    `sequences`: a sample has so many. `has_frozen_copy`: the run also holds a frozen model of the same size.

    Raises:
        UserError: no layout fits.
    """
    device = mesh.resolve_device(args.layout.device)
    mesh.start_process_group(device, host_tensors=device.type == "cuda")  # the layout may offload
    work, check = work_of(args, sequences, has_frozen_copy), functools.partial(check_layout, args, command)
    flags, line = choose_layout(args.model.pretrain, work, device, check)
    if dist.get_rank() == 0:
        print(line, flush=True)
    return with_flags(args, layout="flags", **flags)


def check_layout(args, command: str, flags: dict) -> None:
    """Raise UserError if the other flags of the run rule out these flags of a layout."""
    chosen = with_flags(args, layout="flags", **flags)
    refuse(command, chosen)
    strategy_of(chosen)
    choose_attention(chosen)


def work_of(args, sequences: int, has_frozen_copy: bool) -> Work:
    """What a step of this run trains."""
    tokens, length = args.batch.max_tokens_per_micro_batch, args.length.max_len * sequences
    return Work(
        samples=args.batch.train_batch_size,
        micro=-(-tokens // length) if tokens else args.batch.micro_train_batch_size,
        max_len=length,
        by_tokens=bool(tokens),
        dtype=args.model.param_dtype,
        has_frozen_copy=has_frozen_copy,
    )

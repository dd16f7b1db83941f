"""`--layout auto` in a run: what a step of the run trains, and which flags of a layout go with the other flags."""

import functools

import torch.distributed as dist

from trainer.distributed import mesh
from trainer.flags.parse_flags import with_flags
from trainer.flags.rules import refuse
from trainer.planning.auto_layout import choose_layout
from trainer.planning.plan_inputs import Work
from trainer.runs.feature import Feature
from trainer.runs.run_setup import choose_attention, strategy_of
from trainer.terminal import fitted


def choose(run) -> None:
    """Replace the flags of the run by those of the chosen layout, which config.yaml then repeats.

    Rank 0 chooses and broadcasts. Raises UserError if no layout fits.
    """
    args, method = run.args, run.method
    device = mesh.resolve_device(args.layout.device)
    mesh.start_process_group(device, host_tensors=device.type == "cuda")  # the layout may offload
    work = work_of(args, method.loader_options.get("sequences_per_sample", 1), method.has_frozen_copy)
    check = functools.partial(check_layout, args, method.command)
    flags, line = choose_layout(args.model.pretrain, work, device, check)
    if dist.get_rank() == 0:
        print(fitted(line), flush=True)
    run.args = with_flags(args, layout="flags", **flags)


LAYOUT = Feature("layout", lambda run: run.args.layout.layout == "auto", before_setup=choose)


def check_layout(args, command: str, flags: dict) -> None:
    """Raise UserError if the other flags of the run rule out these flags of a layout."""
    chosen = with_flags(args, layout="flags", **flags)
    refuse(command, chosen)
    strategy_of(chosen)
    choose_attention(chosen)


def work_of(args, sequences: int, has_frozen_copy: bool) -> Work:
    """What a step of this run trains. A sample has so many `sequences`. `has_frozen_copy`: a second model is held."""
    tokens, length = args.batch.max_tokens_per_micro_batch, args.length.max_len * sequences
    return Work(
        samples=args.batch.train_batch_size,
        micro=-(-tokens // length) if tokens else args.batch.micro_train_batch_size,
        max_len=length,
        by_tokens=bool(tokens),
        dtype=args.model.param_dtype,
        num_frozen=int(has_frozen_copy),
        lora_rank=args.lora.lora_rank or 0,
    )

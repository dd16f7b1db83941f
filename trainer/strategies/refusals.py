"""Flags that a backend refuses. `plan` reads these too, so neither backend is imported here."""

from trainer.errors import UserError
from trainer.strategies.options import StrategyOptions


def refuse_idle_tp_flags(options: StrategyOptions) -> None:
    """Raise UserError for a flag that needs tensor parallelism, if there is none."""
    flags = {
        "--use_hf_tp_plan": options.use_hf_tp_plan,
        "--sequence_parallel": options.sequence_parallel,
        "--print_tp_plan": options.print_tp_plan,
    }
    for flag, used in flags.items():
        if used and options.tensor_parallel_size == 1:
            allowed = "--tensor_parallel_size 2 or more, or leave the flag out"
            raise UserError(flag, "with --tensor_parallel_size 1", allowed)


def refuse_on_fsdp2(options: StrategyOptions) -> None:
    """Raise UserError for what the FSDP2 strategy cannot do."""
    tp = options.tensor_parallel_size
    refuse_idle_tp_flags(options)
    if options.load_in_4bit:
        raise UserError("--load_in_4bit", "with --backend fsdp2", "--backend deepspeed with --zero_stage 0, 1, 2")
    if options.lora_rank and options.sequence_parallel:
        raise UserError("--lora_rank", "with --sequence_parallel", "one of them")
    if options.compile and tp > 1:
        # torch 2.13 fails in the backward pass of compiled layers that are sharded over tp (views of DTensors)
        found = f"with --backend fsdp2 and --tensor_parallel_size {tp}"
        raise UserError("--compile", found, "--tensor_parallel_size 1, or --backend deepspeed")
    if options.reduce_once and options.adam_offload:  # gradients go to host memory as soon as they are reduced
        raise UserError("--reduce_once", "with --adam_offload", "one of them")
    if options.reduce_dtype == "bf16" and (options.reduce_once or options.dp_replicate_size > 1):
        # FSDP2 would also sum up micro-batches in bf16
        flag = "--reduce_once" if options.reduce_once else "--dp_replicate_size"
        raise UserError("--reduce_dtype", f"bf16 with --backend fsdp2 and {flag}", "one of them")
    if options.optim != "adamw" and options.adam_offload:  # it gathers tensors on the device
        raise UserError("--optim", f"{options.optim} with --adam_offload", "adamw")
    if options.zero_stage not in (None, 2, 3):
        found = f"{options.zero_stage} with --backend fsdp2"
        raise UserError("--zero_stage", found, "3 (the default), 2 (keep weights gathered)")


def refuse_on_deepspeed(options: StrategyOptions) -> None:
    """Raise UserError for what the DeepSpeed strategy cannot do."""
    stage, tp = 2 if options.zero_stage is None else options.zero_stage, options.tensor_parallel_size
    refuse_idle_tp_flags(options)
    if stage not in (0, 1, 2, 3):
        raise UserError("--zero_stage", str(stage), "0, 1, 2 (the default), 3")
    if options.expert_parallel_size > 1:
        raise UserError("--expert_parallel_size", "with --backend deepspeed", "--backend fsdp2")
    if stage == 0 and options.param_dtype == "fp16":
        raise UserError("--zero_stage", "0 with --param_dtype fp16", "1, 2, 3, or --param_dtype bf16, fp32")
    if stage == 0 and options.adam_offload:
        raise UserError("--adam_offload", "with --zero_stage 0", "--zero_stage 1, 2, 3")
    if stage < 3 and options.dp_replicate_size > 1:
        # ZeRO++ hpZ gathers weights within dp_shard x sp; only ZeRO 3 gathers weights
        found = f"{options.dp_replicate_size} with --zero_stage {stage}"
        raise UserError("--dp_replicate_size", found, "--zero_stage 3")
    if options.sequence_parallel:
        found = "with --backend deepspeed; its AutoTP has no such mode"
        raise UserError("--sequence_parallel", found, "--backend fsdp2")
    if options.lora_rank and tp > 1:
        found = f"with --backend deepspeed and --tensor_parallel_size {tp}"
        raise UserError("--lora_rank", found, "--backend fsdp2, or --tensor_parallel_size 1")
    if options.lora_experts and stage == 3:
        raise UserError("--lora_experts", "with --zero_stage 3", "--zero_stage 0, 1, 2, or --backend fsdp2")
    if options.load_in_4bit and stage == 3:
        raise UserError("--load_in_4bit", "with --zero_stage 3", "--zero_stage 0, 1, 2")
    if options.compile and stage == 3:
        # the hooks of ZeRO 3 make graphs that are too small for a gain and take minutes to compile
        raise UserError("--compile", "with --backend deepspeed and --zero_stage 3", "--zero_stage 0, 1, 2")
    if options.reduce_once and stage > 1:  # ZeRO 0 and 1 always reduce once
        found = f"with --backend deepspeed and --zero_stage {stage}"
        raise UserError("--reduce_once", found, "--zero_stage 0, 1; or --backend fsdp2")
    if options.optim != "adamw" and (stage > 0 or tp > 1):
        # ZeRO gives an optimizer flat stretches of many weights, and AutoTP gives parts; neither is a matrix
        layout = f"--zero_stage {stage} and --tensor_parallel_size {tp}"
        found = f"{options.optim} with --backend deepspeed, {layout}"
        raise UserError("--optim", found, "adamw; or --zero_stage 0 without tp, or --backend fsdp2")

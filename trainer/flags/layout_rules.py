"""Rules for the flags that a strategy is built from: what each backend cannot do. `plan` reads them, too."""

from trainer.flags.rule import Rule

ONE = "Use only one of the two."

# fmt: off
TP_RULES = (
    Rule("use_hf_tp_plan sequence_parallel print_tp_plan", lambda f: f.tensor_parallel_size == 1,
         "with --tensor_parallel_size 1", "it is about layers that are sharded over tp",
         "Set --tensor_parallel_size to 2 or more, or remove the flag."),
)
# fmt: on

# fmt: off
FSDP2_RULES = (
    *TP_RULES,
    Rule("load_in_4bit", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "each rank keeps quantized weights as a whole", "Set it to 1, or remove --load_in_4bit."),
    Rule("fp8", lambda f: f.tensor_parallel_size > 1, "with --tensor_parallel_size {tensor_parallel_size}",
         "torchao's layers have a tensor-parallel plan of their own", "Set it to 1, or remove --fp8."),
    Rule("load_in_4bit", lambda f: f.expert_parallel_size > 1, "with --expert_parallel_size {expert_parallel_size}",
         "experts are not quantized", ONE),
    Rule("load_in_4bit", lambda f: f.adam_offload, "with --backend fsdp2 and --adam_offload",
         "FSDP2 would move the weights to host memory, too", "Take --backend deepspeed, or remove one of them."),
    Rule("lora_rank", lambda f: f.sequence_parallel, "with --sequence_parallel",
         "an adapter's matrices see only a part of the tokens", ONE),
    Rule("compile", lambda f: f.tensor_parallel_size > 1,
         "with --backend fsdp2 and --tensor_parallel_size {tensor_parallel_size}",
         "torch 2.13 fails in the backward pass of compiled layers that are sharded over tp",
         "Set --tensor_parallel_size to 1, or take --backend deepspeed."),
    Rule("reduce_once", lambda f: f.adam_offload, "with --adam_offload",
         "gradients go to host memory as soon as they are reduced", ONE),
    Rule("reduce_dtype", lambda f: f.reduce_once, "with --backend fsdp2 and --reduce_once",
         "FSDP2 would also add up micro-batches in bf16", "Remove one of them."),
    Rule("reduce_dtype", lambda f: f.dp_replicate_size > 1,
         "with --backend fsdp2 and --dp_replicate_size {dp_replicate_size}",
         "FSDP2 would also add up micro-batches in bf16", "Remove one of them."),
    Rule("optim", lambda f: f.adam_offload, "with --adam_offload", "this optimizer gathers tensors on the device",
         "Take --optim adamw."),
    Rule("zero_stage", lambda f: True, "with --backend fsdp2", "FSDP2 always shards gradients and optimizer states",
         "Take 3 (the default), or 2 (weights stay gathered).", values=(0, 1)),
)
# fmt: on


def _stage(f) -> int:
    return 2 if f.zero_stage is None else f.zero_stage


# fmt: off
DEEPSPEED_RULES = (
    *TP_RULES,
    Rule("expert_parallel_size", lambda f: True, "with --backend deepspeed", "ZeRO does not know the ep axis",
         "Take --backend fsdp2."),
    Rule("zero_stage", lambda f: f.param_dtype == "fp16", "with --param_dtype fp16", "this stage has no loss scaling",
         "Take --zero_stage 1, 2 or 3, or --param_dtype bf16 or fp32.", values=(0,)),
    Rule("param_dtype", lambda f: f.on_cpu, "with --backend deepspeed on the CPU", "DeepSpeed has fp16 on GPUs only",
         "Take bf16 or fp32, or --backend fsdp2.", values=("fp16",)),
    Rule("adam_offload", lambda f: _stage(f) == 0, "with --zero_stage 0",
         "this stage keeps the optimizer with the weights", "Take --zero_stage 1, 2 or 3."),
    Rule("dp_replicate_size", lambda f: _stage(f) < 3, "with --backend deepspeed and without --zero_stage 3",
         "hybrid sharding gathers weights within dp_shard x sp, and only ZeRO 3 gathers weights",
         "Take --zero_stage 3."),
    Rule("sequence_parallel", lambda f: True, "with --backend deepspeed", "its AutoTP has no such mode",
         "Take --backend fsdp2."),
    Rule("lora_rank", lambda f: f.tensor_parallel_size > 1,
         "with --backend deepspeed and --tensor_parallel_size {tensor_parallel_size}",
         "AutoTP replaces the layers that an adapter wraps", "Take --backend fsdp2, or --tensor_parallel_size 1."),
    Rule("lora_experts", lambda f: _stage(f) == 3, "with --zero_stage 3",
         "peft adds the update to weights that this stage does not hold as a whole",
         "Take --zero_stage 0, 1 or 2, or --backend fsdp2."),
    Rule("use_dora", lambda f: _stage(f) == 3, "with --zero_stage 3",
         "DoRA reads weights that this stage does not hold as a whole",
         "Take --zero_stage 0, 1 or 2, or --backend fsdp2."),
    Rule("fp8", lambda f: True, "with --backend deepspeed", "its layers are tested with FSDP2 alone",
         "Take --backend fsdp2."),
    Rule("load_in_4bit", lambda f: _stage(f) == 3, "with --zero_stage 3",
         "this stage does not shard quantized weights", "Take --zero_stage 0, 1 or 2."),
    Rule("compile", lambda f: _stage(f) == 3, "with --backend deepspeed and --zero_stage 3",
         "its hooks cut the graphs so small that they gain nothing and take minutes to compile",
         "Take --zero_stage 0, 1 or 2."),
    Rule("reduce_once", lambda f: _stage(f) > 1, "with --backend deepspeed and --zero_stage 2 or 3",
         "these stages reduce after each micro-batch; ZeRO 0 and 1 always reduce once",
         "Take --zero_stage 0 or 1, or --backend fsdp2."),
    Rule("optim", lambda f: _stage(f) > 0, "with --backend deepspeed and without --zero_stage 0",
         "ZeRO gives an optimizer flat stretches of many weights, which are no matrices",
         "Take --optim adamw, --zero_stage 0 without tp, or --backend fsdp2."),
    Rule("optim", lambda f: f.tensor_parallel_size > 1,
         "with --backend deepspeed and --tensor_parallel_size {tensor_parallel_size}",
         "AutoTP gives an optimizer parts of matrices",
         "Take --optim adamw, --tensor_parallel_size 1, or --backend fsdp2."),
)
# fmt: on

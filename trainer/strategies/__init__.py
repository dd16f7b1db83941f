"""The two strategies behind one duck-typed API; `get_strategy(args)` is the only place that chooses."""


def get_strategy(args):
    """The strategy that `args.backend` names, built from the flags that concern distribution and numerics."""
    options = {
        "seed": args.seed,
        "param_dtype": args.param_dtype,
        "max_norm": args.max_norm,
        "zero_stage": args.zero_stage,
        "adam_offload": args.adam_offload,
        "tensor_parallel_size": args.tensor_parallel_size,
        "use_hf_tp_plan": args.use_hf_tp_plan,
        "sequence_parallel": args.sequence_parallel,
        "print_tp_plan": args.print_tp_plan,
        "ring_attn_size": args.ring_attn_size,
        "dp_replicate_size": args.dp_replicate_size,
        "device": args.device,
        "dist_backend": args.dist_backend,
        "deterministic": args.deterministic,
        "lora": args.lora_rank is not None,
        "load_in_4bit": args.load_in_4bit,
        "compile": args.compile,
        "reduce_once": args.reduce_once,
        "optim": args.optim,
    }
    if args.backend == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy

        return DeepspeedStrategy(**options)
    from trainer.strategies.fsdp2 import FSDP2Strategy

    return FSDP2Strategy(**options)

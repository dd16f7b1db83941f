"""The flags under "LoRA": checks of the flags, and the adapter that they request."""

import importlib.util

from trainer.errors import UserError


def validate_adapter_flags(args) -> None:
    """Raise UserError for flags that need --lora_rank, do not fit the layout, or need a missing package."""
    if args.lora_rank is None:
        given = {"--lora_alpha": args.lora_alpha, "--lora_dropout": args.lora_dropout}
        given |= {"--target_modules": args.target_modules, "--load_in_4bit": args.load_in_4bit}
        given |= {"--lora_experts": args.lora_experts}
        for flag, value in given.items():
            if value:
                raise UserError(flag, f"{value} without --lora_rank", "--lora_rank, or leave it out")
    needed = {"--lora_rank": ("peft", "lora", True), "--load_in_4bit": ("bitsandbytes", "qlora", args.load_in_4bit)}
    for flag, (package, extra, is_used) in needed.items():
        if is_used and importlib.util.find_spec(package) is None:
            raise UserError(flag, f"{package} is not installed", f"pip install -e '.[{extra}]'")
    if args.lora_dropout == 1:
        raise UserError("--lora_dropout", "1, which drops everything", "a number of 0 or more, below 1")
    for flag, size in (("tensor_parallel_size", args.tensor_parallel_size), ("ring_attn_size", args.ring_attn_size)):
        if args.lora_dropout and size > 1:  # the ranks would drop the same positions of different parts
            raise UserError("--lora_dropout", f"{args.lora_dropout} with --{flag} {size}", "0")
    if args.lora_experts:
        _validate_experts(args)
    if args.target_modules is not None and not _names(args.target_modules):
        raise UserError("--target_modules", repr(args.target_modules), "comma-separated names of layers")


def _validate_experts(args) -> None:
    """Raise UserError for flags that do not go with adapters on experts."""
    conflicts = {
        f"--lora_dropout {args.lora_dropout}": args.lora_dropout,  # peft adds the update to the weights
        f"--tensor_parallel_size {args.tensor_parallel_size}": args.tensor_parallel_size > 1,
        "--load_in_4bit": args.load_in_4bit,
        "--compile": args.compile,
    }
    for flag, is_used in conflicts.items():
        if is_used:
            raise UserError("--lora_experts", f"with {flag}", "leave one of them out")


def add_adapter_of_flags(args, strategy, model) -> None:
    """Add the adapter of the flags to a model that is not wrapped yet. Print the number of trainable parameters."""
    from trainer.models.lora import LoraOptions, add_adapter

    targets = _names(args.target_modules) if args.target_modules else None
    alpha = args.lora_alpha or 2 * args.lora_rank
    options = LoraOptions(args.lora_rank, alpha, args.lora_dropout, targets, args.lora_experts)
    add_adapter(model, options, args.pretrain)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    strategy.print(f"LoRA of rank {args.lora_rank}: {num_trained} trainable parameters")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())

"""`--lora_rank`: the adapter of low-rank matrices that the flags describe."""

import importlib.util
import os

from trainer.errors import UserError
from trainer.flags.common_flags import LoraArguments
from trainer.models.lora import LoraOptions, add_adapter
from trainer.runs.feature import Feature


def add_adapter_of_flags(flags: LoraArguments, strategy, model, pretrain: str) -> None:
    """Add the adapter of the flags to a model that is not wrapped yet. Print the number of trainable parameters."""
    names = names_of(flags.target_modules or "")
    targets = None if names in ((), ("all-linear",), ("all",)) else names  # peft's and LLaMA-Factory's names for all
    alpha = flags.lora_alpha or 2 * flags.lora_rank
    options = LoraOptions(flags.lora_rank, alpha, flags.lora_dropout, targets, flags.lora_experts)
    add_adapter(model, options, os.path.abspath(pretrain) if os.path.isdir(pretrain) else pretrain)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    strategy.print(f"LoRA of rank {flags.lora_rank}: {num_trained} trainable parameters")


def check_adapter(flags: LoraArguments) -> None:
    """Raise UserError for a missing package, or for values that no adapter can have."""
    needed = {
        "--lora_rank": ("peft", "lora", flags.lora_rank),
        "--load_in_4bit": ("bitsandbytes", "qlora", flags.load_in_4bit),
    }
    for flag, (package, extra, is_used) in needed.items():
        if is_used and importlib.util.find_spec(package) is None:
            raise UserError(flag, f"{package} is not installed", f"pip install -e '.[{extra}]'")
    if flags.lora_dropout == 1:
        raise UserError("--lora_dropout", "1, which drops everything", "a number of 0 or more, below 1")
    if flags.target_modules is not None and not names_of(flags.target_modules):
        raise UserError("--target_modules", repr(flags.target_modules), "comma-separated names of layers")


def names_of(text: str) -> tuple[str, ...]:
    """The names in a comma-separated text."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def adapt(run) -> None:
    add_adapter_of_flags(run.args.lora, run.setup.strategy, run.model, run.args.model.pretrain)


ADAPTER = Feature("adapter", lambda run: run.args.lora.lora_rank, with_loss=adapt)

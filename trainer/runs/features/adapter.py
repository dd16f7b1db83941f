"""`--lora_rank`: the adapter of low-rank matrices that the flags describe."""

import os
from typing import Optional

from trainer.comma_separated import names_in
from trainer.flags.common_flags import LoraArguments
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import read_adapter
from trainer.models.lora import LoraOptions, add_adapter
from trainer.runs.feature import Feature


def add_adapter_of_flags(flags: LoraArguments, strategy, model, pretrain: str, start: Optional[str] = None) -> None:
    """Add the adapter of the flags to a model that is not wrapped yet. Print the number of trainable parameters.

    `start` is the folder of the adapter that it goes on from.
    """
    names = tuple(names_in(flags.target_modules))
    targets = None if names in ((), ("all-linear",), ("all",)) else names  # peft's and LLaMA-Factory's names for all
    alpha = flags.lora_alpha or 2 * flags.lora_rank
    kind = {"experts": flags.lora_experts, "dora": flags.use_dora, "rslora": flags.use_rslora, "start": start}
    options = LoraOptions(flags.lora_rank, alpha, flags.lora_dropout, targets, **kind)
    add_adapter(model, options, os.path.abspath(pretrain) if os.path.isdir(pretrain) else pretrain)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    origin = f", from {start}" if start else ""
    strategy.print(f"LoRA of rank {flags.lora_rank}: {counted(num_trained, 'trainable parameter')}{origin}")
    if start and (dropout := read_adapter(start, "--lora_adapter").dropout) != flags.lora_dropout:
        strategy.print(f"its dropout was {dropout}; this run has --lora_dropout {flags.lora_dropout}")


def adapt(run) -> None:
    flags = run.args.lora
    add_adapter_of_flags(flags, run.setup.strategy, run.model, run.args.model.pretrain, flags.lora_adapter)


ADAPTER = Feature("adapter", lambda run: run.args.lora.lora_rank, with_loss=adapt)

"""`--lora_rank`: the adapter of low-rank matrices that the flags describe.

With `--merge_adapter`, the merged model is first written into the run folder, and the new adapter is trained on it.
"""

import os
import subprocess
import sys
from typing import Optional

import torch

from trainer.comma_separated import names_in
from trainer.distributed.collectives import rank_0_alone, wait_for_all
from trainer.errors import UserError
from trainer.flags.common_flags import LoraArguments
from trainer.flags.groups import with_flags
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import read_adapter
from trainer.model_folders.folder_names import find_weights
from trainer.model_folders.model_folder import SafetensorsFolder, read_config
from trainer.models.lora import LoraOptions, add_adapter
from trainer.models.model_loading import model_class
from trainer.runs.feature import Feature

BASE = "base"  # in the run folder; the new adapter names it as its base model


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


def check_targets(run) -> None:
    """Raise UserError for --target_modules that the model does not have, before its data is read."""
    flags, folder = run.args.lora, run.setup.folder
    names = names_in(flags.target_modules)
    if flags.lora_adapter or names in ([], ["all-linear"], ["all"]):
        return
    tensors = SafetensorsFolder(folder).names() if find_weights(folder, "--pretrain") == "safetensors" else []
    held = [f".{tensor.rpartition('.')[0]}" for tensor in tensors]
    config = read_config(folder, run.setup.trust_remote_code)
    is_open = model_class(config, run.auto_class._model_mapping) is None  # rows with images may choose another class
    if is_open or all(any(module.endswith(f".{name}") for module in held) for name in names):
        return  # the loaded model decides
    with torch.device("meta"):
        model = run.auto_class.from_config(config, trust_remote_code=run.setup.trust_remote_code)
    add_adapter(model, LoraOptions(1, 1, 0.0, tuple(names)), folder)


def adapt(run) -> None:
    flags = run.args.lora
    add_adapter_of_flags(flags, run.setup.strategy, run.model, run.args.model.pretrain, flags.lora_adapter)


ADAPTER = Feature("adapter", lambda run: run.args.lora.lora_rank, before_data=check_targets, with_loss=adapt)


# --- --merge_adapter


def merge_first(run) -> None:
    """Put the merged model in the place of --pretrain. The update is added in fp32, and written in the dtype of the base.

    A resumed run finds the folder that its first start wrote.
    """
    adapter, base = run.args.lora.lora_adapter, run.setup.folder
    target = os.path.join(os.path.abspath(run.open()), BASE)
    if os.path.isdir(target) and not run.setup.resumes:
        raise UserError("--output_dir", f"{target} is there already", "another folder, or remove that one")
    wait_for_all()
    rank_0_alone(lambda: os.path.isdir(target) or export_merged(adapter, base, target))
    run.setup.strategy.print(f"{adapter} merged into {target}, the base model of the new adapter")
    run.setup.folder = target
    run.args = with_flags(run.args, pretrain=target, lora_adapter=None, merge_adapter=False)


def export_merged(adapter: str, base: str, target: str) -> None:
    """The command `export`, in a process of its own: its writer would wait for the ranks of this one."""
    command = [sys.executable, "-m", "trainer.cli.export", adapter, target, "--base", base]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError("--merge_adapter", (done.stderr.strip().splitlines() or ["no output"])[-1])


MERGED_BASE = Feature(
    "merged base", lambda run: run.args.lora.merge_adapter and run.args.lora.lora_rank, with_data=merge_first
)

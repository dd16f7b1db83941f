"""Replay steps of a finished `train_sft` run with the plain loop, from its checkpoints, for its certificate."""

import dataclasses
import importlib
import os
import random
from typing import Any

from trainer.checkpoints.checkpoint_store import list_checkpoints
from trainer.compare.runs.plain_loop import load_plain_model, plain_step, read_checkpoint
from trainer.datasets.batches.global_batches import epoch_order
from trainer.datasets.conversations.templates import load_chat_template
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.kd_flags import KDArguments
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.models.model_loading import load_tokenizer
from trainer.reports import certificate

# what the plain loop does not do
UNSUPPORTED = ("streaming", "lora_rank", "load_in_4bit", "aux_loss_coef", "expert_bias_update_rate")
# (loss, gradient norm): rounding of bf16 and fp16 moves the norm too much to judge it against fp32
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, None), "fp16": (1e-2, None)}

# by command: its flags, and the command that reads its data
READERS = {
    "train_sft": (SFTArguments, "train_sft"),
    "train_kd": (KDArguments, "train_sft"),
    "train_dpo": (DPOArguments, "train_dpo"),
    "train_rm": (RMArguments, "train_rm"),
}


def check_replay_flags(arguments: dict) -> None:
    """Raise UserError for flags that the plain loop does not know, or that leave no certificate."""
    for name in UNSUPPORTED:
        if arguments.get(name):
            raise UserError("--certify", f"with --{name}, which the plain loop does not have", "leave one of them out")
    for name in ("no_save", "verify_resume"):
        if arguments.get(name):
            raise UserError("--certify", f"with --{name}, which writes no certificate", "one of them")


def certify_steps(folder: str, num_steps: int, device: str, model_folder: str, dataset: str | None = None) -> str:
    """Replay up to `num_steps` random steps and write them into the certificate. Returns a line with the result.

    A step can be replayed if its weights are known: step 1, and each step after a checkpoint. `dataset` replaces
    --dataset on another machine.
    """
    content = certificate.read(folder)
    arguments, rows = content["arguments"], {row["step"]: row for row in certificate.final_rows(folder)[1]}
    if content["command"] != "train_sft":
        raise UserError("--certify", f"a run of {content['command']}", "a run of train_sft")
    check_replay_flags(arguments)
    places = {step: place for step, place in _places(folder).items() if step in rows}
    # the seed is the chain, so nobody can choose the steps
    chosen = sorted(random.Random(content["steps"]["row_chain"]).sample(sorted(places), min(num_steps, len(places))))
    content["replays"] = _replay(content, {step: places[step] for step in chosen}, rows, device, model_folder, dataset)
    certificate.write(folder, content)
    failed = [replay for replay in content["replays"] if not replay["within_tolerance"]]
    worst = max((replay["relative_loss"] for replay in content["replays"]), default=0.0)
    named = ", ".join(f"step {replay['step']}" for replay in failed)
    result = f"not within tolerance: {named}" if failed else "all within tolerance"
    few = "" if len(chosen) == num_steps else f" ({num_steps} requested; only steps after a checkpoint can be replayed)"
    return f"certify: {len(chosen)} steps replayed by the plain loop{few}, {result}; worst loss difference {worst:.2g}"


def _places(folder: str) -> dict[int, str | None]:
    """{step that can be replayed: checkpoint with its weights, or None for the model folder}."""
    found = list_checkpoints(os.path.join(folder, "checkpoints"))
    return {1: None, **{int(path.rpartition("_")[2]) + 1: path for path in found}}


def _replay(
    content: dict, places: dict[int, str | None], rows: dict, device: str, model_folder: str, dataset: str | None
) -> list[dict]:
    arguments = content["arguments"]
    samples, batches = planned_batches(content, model_folder, dataset)
    loss_limit, norm_limit = TOLERANCES[arguments["param_dtype"]]
    model, replays = load_plain_model(model_folder, device, arguments["trust_remote_code"]), []
    for step, place in places.items():
        if place:
            read_checkpoint(model, place)
        loss, norm = plain_step(model, [samples[i] for i in batches(step)])
        relative_loss = abs(rows[step]["loss"] / loss - 1)
        relative_norm = abs(rows[step]["grad_norm"] / norm - 1)
        good = relative_loss <= loss_limit and (norm_limit is None or relative_norm <= norm_limit)
        replay = {"step": step, "from": os.path.basename(place) if place else "model", "loss": loss, "grad_norm": norm}
        replay |= {"relative_loss": relative_loss, "relative_grad_norm": relative_norm, "within_tolerance": good}
        replays.append(replay)
    return replays


def planned_batches(content: dict, model_folder: str, dataset: str | None = None) -> tuple[Any, Any]:
    """(tokenized samples, function from a step to its sample ids), both from the data and the certificate's flags."""
    kind, door = READERS[content["command"]]
    load_data = importlib.import_module(f"trainer.cli.{door}").load_data  # by name: the doors stand above
    flags = {**content["arguments"], "dataset": dataset or content["arguments"]["dataset"]}
    args = kind(**{field.name: flags[field.name] for field in dataclasses.fields(kind) if field.name in flags})
    tokenizer = load_tokenizer(model_folder, args.trust_remote_code)
    load_chat_template(args.tokenizer_chat_template, tokenizer)
    samples, _ = load_data(args, tokenizer, args.dataset, args.dataset_split, "--dataset")
    size = args.train_batch_size
    per_epoch, orders = -(-len(samples) // size), {}

    def batch(step: int) -> list[int]:
        epoch, index = divmod(step - 1, per_epoch)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = epoch_order(len(samples), args.seed, epoch, not args.no_shuffle)
        return orders[epoch][index * size : (index + 1) * size].tolist()

    return samples, batch

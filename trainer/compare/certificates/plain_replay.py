"""Replay steps of a finished `train_sft` run with the plain loop, from its checkpoints, for its certificate."""

import os
import random
from typing import Any

from trainer.checkpoints.checkpoint_store import list_checkpoints, step_of
from trainer.compare.runs.plain_loop import load_plain_model, plain_step, read_checkpoint
from trainer.datasets.batches.global_batches import epoch_order
from trainer.errors import UserError
from trainer.flags.parse_flags import flags_of, from_flat
from trainer.flags.rules import COMMANDS
from trainer.flags.training_rules import PLAIN_LOOP_LACKS
from trainer.metrics import counted
from trainer.reports import certificate
from trainer.runs.feature import Feature
from trainer.runs.preference_runs import load_dpo, load_pairs
from trainer.runs.run_data import load_sft, part_of
from trainer.runs.run_setup import prepared_tokenizer, tokenizer_folder

# (loss, gradient norm): rounding of bf16 and fp16 moves the norm too much to judge it against fp32
TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, None), "fp16": (1e-2, None)}

# what reads the data of a command
LOADERS = {"train_sft": load_sft, "train_kd": load_sft, "train_dpo": load_dpo, "train_rm": load_pairs}


def check_replay_flags(arguments: dict) -> None:
    """Raise UserError for flags of a run that the plain loop does not know."""
    for name in PLAIN_LOOP_LACKS:
        if arguments.get(name):
            raise UserError("--certify", f"a run with --{name}, which the plain loop does not have", "a run without it")


def certify_steps(
    folder: str,
    num_steps: int,
    device: str,
    model_folder: str,
    dataset: str | None = None,
    trust_remote_code: bool = False,
    sign_key: str | None = None,
) -> str:
    """Replay up to `num_steps` random steps and write them into the certificate. Returns a line with the result.

    A step can be replayed if its weights are known: step 1, and each step after a checkpoint. `dataset` replaces
    --dataset on another machine. Code of the model folder runs only with `trust_remote_code`, whatever the run had.
    A certificate that is signed needs `sign_key`, since its content changes.
    """
    content = certificate.read(folder)
    if "signature" in content and not sign_key:
        found = f"{certificate.FILE} is signed, and the replay would end its signature"
        raise UserError("--certify", found, "--sign_key with the private key")
    arguments, rows = content["arguments"], {row["step"]: row for row in certificate.final_rows(folder)[1]}
    if content["command"] != "train_sft":
        raise UserError("--certify", f"a run of {content['command']}", "a run of train_sft")
    check_replay_flags(arguments)
    places = {step: place for step, place in _places(folder).items() if step in rows}
    # the seed is the chain, so nobody can choose the steps
    chosen = sorted(random.Random(content["steps"]["row_chain"]).sample(sorted(places), min(num_steps, len(places))))
    chosen_places = {step: places[step] for step in chosen}
    content["replays"] = _replay(content, chosen_places, rows, device, model_folder, dataset, trust_remote_code)
    failed = [replay for replay in content["replays"] if not replay["within_tolerance"]]
    certificate.write(folder, content, None if failed else sign_key)
    worst = max((replay["relative_loss"] for replay in content["replays"]), default=0.0)
    named = ", ".join(f"step {replay['step']}" for replay in failed)
    result = f"not within tolerance: {named}{' (not signed)' if sign_key else ''}" if failed else "all within tolerance"
    few = "" if len(chosen) == num_steps else f" ({num_steps} requested; only steps after a checkpoint can be replayed)"
    return f"certify: {counted(len(chosen), 'step')} replayed by the plain loop{few}, {result}; worst loss difference {worst:.2g}"


def _places(folder: str) -> dict[int, str | None]:
    """{step that can be replayed: checkpoint with its weights, or None for the model folder}."""
    found = list_checkpoints(os.path.join(folder, "checkpoints"))
    return {1: None, **{step_of(path) + 1: path for path in found}}


def _replay(
    content: dict,
    places: dict[int, str | None],
    rows: dict,
    device: str,
    model_folder: str,
    dataset: str | None,
    trust_remote_code: bool,
) -> list[dict]:
    arguments = content["arguments"]
    samples, batches = planned_batches(content, model_folder, dataset, trust_remote_code)
    loss_limit, norm_limit = TOLERANCES[arguments["param_dtype"]]
    model, replays = load_plain_model(model_folder, device, trust_remote_code), []
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


def planned_batches(
    content: dict, model_folder: str, dataset: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """(tokenized samples, function from a step to its sample ids), both from the data and the certificate's flags.

    The right to run code is the caller's `trust_remote_code`, not that of the certificate.
    """
    flags, command = content["arguments"] | {"dataset": dataset or content["arguments"]["dataset"]}, content["command"]
    flags = flags | {"trust_remote_code": trust_remote_code, "pretrain": model_folder}
    known = {field.name for field, _ in flags_of(COMMANDS[command])} - {"dataset_num_proc"}  # it is of this machine
    args = from_flat(COMMANDS[command], {name: value for name, value in flags.items() if name in known})
    tokenizer = prepared_tokenizer(
        tokenizer_folder(model_folder, args.lora.lora_adapter), args.model.trust_remote_code, args.data
    )
    trained = args.data.dataset, args.data.dataset_split, "--dataset", part_of(args.data, args.batch.seed)
    samples, _ = LOADERS[command](args, tokenizer, *trained)
    size = args.batch.train_batch_size
    per_epoch, orders = -(-len(samples) // size), {}

    def batch(step: int) -> list[int]:
        epoch, index = divmod(step - 1, per_epoch)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = epoch_order(len(samples), args.batch.seed, epoch, not args.batch.no_shuffle)
        return orders[epoch][index * size : (index + 1) * size].tolist()

    return samples, batch


def replay_steps(run) -> None:
    """Replay K steps of a finished run with the plain loop, and write the result into its certificate (rank 0)."""
    if run.setup.strategy.is_rank_0():
        device, folder = str(run.setup.strategy.device), run.setup.folder
        trusted = run.args.model.trust_remote_code
        key = run.flags.sign_key
        print(certify_steps(run.output_dir, run.flags.certify, device, folder, None, trusted, key), flush=True)


REPLAY = Feature("replay", lambda run: run.flags.certify, at_end=replay_steps)

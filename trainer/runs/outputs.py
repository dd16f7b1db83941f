"""What a run writes: its folder, config.yaml, the start of metrics.jsonl, the trained model with its card."""

import contextlib
import dataclasses
import html
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable
from typing import Optional

import yaml

from trainer.datasets.files.set_names import names_on_hub
from trainer.distributed.collectives import broadcast_object, check_shared_folder, wait_for_all
from trainer.errors import UserError
from trainer.flags.common_flags import CheckpointArguments, OutputArguments
from trainer.flags.groups import public_flags
from trainer.limits import lines_of
from trainer.metrics import METRICS_FILE, MetricsLog
from trainer.model_folders.model_writer import PROCESSORS_OF_IMAGES
from trainer.models.cpu_matmul import chosen
from trainer.planning.versions import version_of
from trainer.reports.run_rows import is_number
from trainer.runs.flag_checks import trackers_of
from trainer.runs.output_folders import LOCK_FILE, make_writable, open_folder
from trainer.training.checkpointing import Checkpoints, Progress, SavePolicy

OF_A_RESUME = ("output_dir", "load_checkpoint", "overwrite", "allow_change")  # they say where a run goes on


def open_run(output: OutputArguments, strategy, command: str, resumes: bool, saved: Callable[[str], list[str]]) -> str:
    """Return the run folder; rank 0 makes it, and checks that other output folders are writable.

    `resumes`: --load_checkpoint is given. `saved(folder)` are the folders of the trained models.
    Raises UserError if the folder holds a run that is neither resumed nor overwritten.
    """
    named = output.output_dir or os.path.join("runs", f"{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = broadcast_object(named)
    if strategy.is_rank_0():
        open_folder(folder, output.overwrite, resumes)
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):  # more than one node
        wait_for_all()
        check_shared_folder("--output_dir", folder, LOCK_FILE)
    if strategy.is_rank_0():
        for path in saved(folder):
            make_writable("--save_path", os.path.dirname(os.path.realpath(path)))
        if output.parity_dump:
            make_writable("--parity_dump", output.parity_dump)
    return folder


def save_policy(checkpoint: CheckpointArguments) -> SavePolicy:
    """When and how to save, from the flags under "Checkpoints"."""
    return SavePolicy(
        save_steps=checkpoint.save_steps,
        interval_minutes=checkpoint.save_interval_minutes,
        max_num=checkpoint.max_ckpt_num,
        max_gigabytes=checkpoint.max_ckpt_mem,
        best_metric_key=checkpoint.best_metric_key,
        early_stopping_patience=checkpoint.early_stopping_patience,
        portable=checkpoint.ckpt_format == "portable",
        background=checkpoint.async_save,
        hf_weights=checkpoint.save_hf_ckpt,
        only_model=checkpoint.save_only_model,
    )


class ConfigDumper(yaml.SafeDumper):
    """Quotes texts such as 1e-5. YAML itself reads 1e-5 as a text, but the reader of --config reads a number."""

    def represent_text(self, text: str):
        try:
            float(text)
        except ValueError:
            return self.represent_str(text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'")


ConfigDumper.add_representer(str, ConfigDumper.represent_text)


def start_metrics(strategy, args, folder: str, checkpoints: Checkpoints, **facts) -> Optional[MetricsLog]:
    """Write config.yaml and the start row, or the rows of a resume. Returns the log on rank 0, None elsewhere.

    `checkpoints` has resumed.
    """
    if not strategy.is_rank_0():
        return None
    progress, config, output = checkpoints.progress, public_flags(args), args.output
    goes_on = progress.step > 0 and os.path.exists(os.path.join(folder, METRICS_FILE))
    trackers = trackers_of(output)
    written = write_config(folder, config, goes_on)
    metrics = MetricsLog(
        folder,
        trackers=trackers,
        project=output.wandb_project,
        run_name=output.run_name,
        config=config,
        # a checkpoint from elsewhere may name any run of this user's account
        run_ids={tracker: vars(progress).get(f"{tracker}_run_id") if goes_on else None for tracker in trackers},
        needs_whole=output.certificate,
    )
    for tracker, run_id in metrics.run_ids.items():
        setattr(progress, f"{tracker}_run_id", run_id)
    checkpoints.metrics = metrics
    facts = {"config": config, "mesh": dataclasses.asdict(strategy.sizes), "versions": versions(), **facts}
    if strategy.device.type == "cpu":
        facts["cpu_matmul"] = chosen()  # the config may only say auto
    if goes_on:
        metrics.add_missing(checkpoints.kept_rows)
    else:
        metrics.event("start", **facts)
    if progress.step:
        metrics.event("resume", step=progress.step, **(facts if goes_on else {}))
    if checkpoints.changes:
        changed = {change.name: [change.before, change.now] for change in checkpoints.changes}
        metrics.event("changed", step=progress.step, changes=changed, config_file=written)
    return metrics


def write_config(folder: str, config: dict, goes_on: bool) -> str:
    """Write config.yaml. A run that goes on with other flags gets config.2.yaml and so on. Returns the name of the file.

    Raises UserError if the disk is full, for example.
    """
    numbers = [int(found[1]) for name in os.listdir(folder) if (found := re.fullmatch(r"config\.(\d+)\.yaml", name))]
    newest = f"config.{max(numbers)}.yaml" if numbers else "config.yaml"
    path = os.path.join(folder, newest)
    if goes_on and os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                before = yaml.safe_load(file)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            before = None
        if isinstance(before, dict) and _deciding(before) == _deciding(config):
            return newest
        newest = f"config.{max([1, *numbers]) + 1}.yaml"
        path = os.path.join(folder, newest)
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            yaml.dump(config, file, ConfigDumper, sort_keys=False)
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise UserError("--output_dir", f"{path} cannot be written: {error.strerror}", "free disk space") from None
    return newest


def _deciding(config: dict) -> dict:
    """The flags that decide anything about the run from here on, as a file has them."""
    return yaml.safe_load(yaml.dump({k: v for k, v in config.items() if k not in OF_A_RESUME}, None, ConfigDumper))


# packages with kernels of attention, linear attention, losses and 4-bit weights
KERNELS = [
    "flash-attn", "flash-attn-3", "flash-attn-4", "ring-flash-attn", "flash-linear-attention", "fla-core",
    "causal-conv1d", "mamba-ssm", "liger-kernel", "kernels", "triton", "bitsandbytes", "vllm", "peft",
]  # fmt: skip


def versions() -> dict[str, str]:
    """The version of Python, of the packages that every run uses, and of the packages with kernels that are installed.

    transformers takes the kernels of some packages by itself where it can import them.
    """
    packages = ["torch", "transformers", "deepspeed", "datasets", "tokenizers", "safetensors", *KERNELS]
    found = {name: version_of(name) for name in packages}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


# --- the trained model

CARD_FLAGS = (
    "pretrain dataset dataset_split max_len train_batch_size max_epochs learning_rate lr_scheduler lr_warmup_ratio "
    "weight_decay seed param_dtype backend"
)


# what says how a method was run, where it is given
METHOD_FLAGS = (
    "add_tokens warmup_steps preset advantage_estimator reward_func reward_pretrain env loss beta teacher ref_model lora_adapter merge_adapter lora_rank lora_alpha use_dora use_rslora target_modules "
    "load_in_4bit fp8 dataset_probs dataset_flags eval_dataset eval_dataset_flags eval_fraction"
)
MOST_OF_NAME = 200  # characters of the name of an evaluation
USAGE = """```python
from transformers import {auto_class}, {reader}

folder = "."  # this folder, or its name on the hub
model, {name} = {auto_class}.from_pretrained(folder), {reader}.from_pretrained(folder)
```"""
USAGE_OF_HEAD = """```python
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = "."  # this folder, or its name on the hub
base = AutoModelForSequenceClassification.from_pretrained({base!r}, num_labels=1)
model, tokenizer = PeftModel.from_pretrained(base, folder), AutoTokenizer.from_pretrained(folder)
```"""


def save_model(
    strategy, model, tokenizer, path: str, command: str, args, progress: Progress, ledger, output_dir: str
) -> None:
    """Write the trained model and its card, the README.md, to `path` (all ranks)."""
    strategy.save_model(model, tokenizer, path)
    if strategy.is_rank_0():
        results = final_values(output_dir, progress.step)
        write_model_card(path, command, public_flags(args), progress, ledger.summary(), results)
    strategy.print(f"model saved to {path}")


def final_values(output_dir: str, step: float = math.inf) -> dict[str, float]:
    """The last loss, reward and evaluation of a run up to `step`, from its metrics.jsonl. Others may have written it."""
    last: dict = {}
    path = os.path.join(output_dir, METRICS_FILE)
    if not os.path.isfile(path):  # a checkpoint that was moved out of its run
        return {}
    for line in lines_of(path):
        with contextlib.suppress(ValueError, RecursionError):  # a line that is not whole
            row = json.loads(line)
            if isinstance(row, dict) and is_number(at := row.get("step")) and at <= step:
                last |= {name: value for name, value in row.items() if _is_result(name)}
    return {name: value for name, value in last.items() if isinstance(value, float) and is_number(value)}


def _is_result(name: str) -> bool:
    return name in ("loss", "reward") or (
        name.startswith("eval_") and name != "eval_time" and len(name) <= MOST_OF_NAME
    )


def usage_of(folder: str, command: str, config: dict) -> tuple[str, str]:
    """The pipeline tag of a saved model, and the lines that load it."""
    if command == "train_rm" and config["lora_rank"]:  # transformers gives an adapter no head of another size
        return "text-classification", USAGE_OF_HEAD.format(base=config["pretrain"])
    tag, auto_class, reader = "text-generation", "AutoModelForCausalLM", "AutoTokenizer"
    if command == "train_rm":
        tag, auto_class = "text-classification", "AutoModelForSequenceClassification"
    elif any(os.path.isfile(os.path.join(folder, name)) for name in PROCESSORS_OF_IMAGES):
        tag, auto_class, reader = "image-text-to-text", "AutoModelForImageTextToText", "AutoProcessor"
    return tag, USAGE.format(auto_class=auto_class, reader=reader, name=reader.removeprefix("Auto").lower())


def write_model_card(folder: str, command: str, config: dict, progress: Progress, data: str, results: dict) -> None:
    """Write the README.md of a saved model: its base, its `data` in words, its flags and its last `results`.

    A command may lack some of CARD_FLAGS.
    """
    facts = {"command": command, **{name: config[name] for name in CARD_FLAGS.split() if name in config}}
    facts |= {name: config[name] for name in METHOD_FLAGS.split() if config.get(name)}
    facts |= {f"final {name}": f"{value:.4g}" for name, value in results.items()}
    facts |= {"steps": progress.step, "skipped steps": progress.skipped_steps, "tokens seen": progress.tokens_seen}
    rows = "".join(f"| {_plain(name)} | {_plain(value)} |\n" for name, value in facts.items())
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    library = "peft" if config["lora_rank"] else "transformers"
    head = {"library_name": library, "tags": [command]}
    if not os.path.exists(config["pretrain"]):  # the hub refuses a card whose base model is a folder
        head["base_model"] = config["pretrain"]
    head["pipeline_tag"], usage = usage_of(folder, command, config)
    if public := names_on_hub(config["dataset"]):
        head["datasets"] = public
    front = yaml.safe_dump(head)
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8", errors="replace") as file:
        file.write(
            f"---\n{front}---\n\n# Trained from {_plain(config['pretrain'])}\n\n| | |\n|---|---|\n{rows}\n"
            f"Data: {_plain(data)}.\n\n## Use\n\n{usage}\n\nMade with {packages}.\n"
        )


def card_of_merged(card: str, folder: str, scores: bool) -> str:
    """The `card` of an adapter for the whole model in `folder`: the lines of use load this model. `scores`: with a head."""
    usage = usage_of(folder, "train_rm" if scores else "", {"lora_rank": None})[1]
    card = card.replace("library_name: peft", "library_name: transformers", 1)
    return re.sub(r"(?<=\n## Use\n\n)```python\n.*?```", lambda _: usage, card, count=1, flags=re.DOTALL)


def _plain(value) -> str:
    """A text in one line of Markdown: no tags, no cells, no links, no control characters."""
    text = "".join(char if char.isprintable() else " " for char in html.escape(str(value), quote=False))
    return re.sub(r"([\\|`\[\]])", r"\\\1", text)

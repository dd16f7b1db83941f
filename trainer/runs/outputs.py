"""What a run writes: its folder, config.yaml, the start of metrics.jsonl, the trained model with its card."""

import contextlib
import dataclasses
import fcntl
import html
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Optional

import yaml

from trainer.distributed.collectives import broadcast_object, check_shared_folder, wait_for_all
from trainer.errors import UserError, without_secrets
from trainer.flags.common_flags import CheckpointArguments, OutputArguments
from trainer.metrics import METRICS_FILE, MetricsLog
from trainer.models.cpu_matmul import chosen
from trainer.training.checkpointing import Checkpoints, Progress, SavePolicy

LOCK_FILE = ".lock"
OF_A_RESUME = ("output_dir", "load_checkpoint", "overwrite", "allow_change")  # they say where a run goes on
_locks: dict[str, int] = {}  # file descriptors by path: a lock lasts until one is closed


def open_run(output: OutputArguments, strategy, command: str, resumes: bool, saved: Callable[[str], list[str]]) -> str:
    """Return the run folder; rank 0 makes it, and checks that other output folders are writable.

    `resumes`: --load_checkpoint is given. `saved(folder)` are the folders of the trained models.
    Raises UserError if the folder holds a run that is neither resumed nor overwritten.
    """
    named = output.output_dir or os.path.join("runs", f"{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = broadcast_object(named)
    if strategy.is_rank_0():
        _open(folder, output.overwrite, resumes)
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):  # more than one node
        wait_for_all()
        check_shared_folder("--output_dir", folder, LOCK_FILE)
    if strategy.is_rank_0():
        for path in saved(folder):
            make_writable("--save_path", os.path.dirname(os.path.realpath(path)))
        if output.parity_dump:
            make_writable("--parity_dump", output.parity_dump)
    return folder


def check_run_folder(output_dir: Optional[str], sources: dict[str, Optional[str]]) -> None:
    """Raise UserError for a run folder that is no place to write and remove files in.

    `sources` are the flags that name models and data, comma-separated.
    """
    if not output_dir:
        return
    place = os.path.realpath(output_dir)
    if place in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise UserError("--output_dir", f"{output_dir} is {place}", "a folder within it")
    for name, value in sources.items():
        if any(os.path.realpath(source.strip()) == place for source in (value or "").split(",") if source.strip()):
            raise UserError(
                "--output_dir", f"{output_dir} is the folder of --{name}", "another folder, or one within it"
            )
    if os.path.exists(os.path.join(place, "config.json")):
        raise UserError("--output_dir", f"{output_dir} holds a model", "another folder, or one within it")


def _open(folder: str, overwrite: bool, resumes: bool) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("--output_dir", f"{folder} is a file", "a folder")
    if holds_run(folder) and not resumes:
        if not overwrite:
            allowed = "another folder, --load_checkpoint to resume it, or --overwrite"
            raise UserError("--output_dir", f"{folder} holds another run", allowed)
        lock_folder(folder)
        for name in f"{METRICS_FILE} config.yaml certificate.json tensorboard checkpoints rollouts.jsonl ahead".split():
            path = os.path.join(folder, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
    make_writable("--output_dir", folder)
    lock_folder(folder)


def lock_folder(folder: str) -> None:
    """Make this process the only writer of a run folder until it ends. Raises UserError if another run writes there.

    The kernel frees the lock when its process dies, so no lock is ever stale. The file says who holds it.
    """
    path = os.path.realpath(os.path.join(folder, LOCK_FILE))
    if path in _locks:
        return
    lock = _locks[path] = os.open(path, os.O_RDWR | os.O_CREAT)
    for seconds in [0.25] * 20 + [0]:  # a run that was just killed may need a moment to go
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            time.sleep(seconds)
        except OSError:
            return  # a file system without locks
    else:
        found = f"{folder} is being written by another run ({os.read(lock, 500).decode()})"
        raise UserError("--output_dir", found, "another folder, or end that run first")
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())


def holds_run(folder: str) -> bool:
    """Whether a run has written there. A run with --verify_resume leaves only checkpoints."""
    checkpoints = os.path.join(folder, "checkpoints")
    return os.path.exists(os.path.join(folder, METRICS_FILE)) or (
        os.path.isdir(checkpoints) and any(os.scandir(checkpoints))
    )


def make_writable(flag: str, folder: str) -> None:
    """Make `folder` and write a temporary file in it. Raises UserError if that fails."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(flag, f"{folder}: {error.strerror}", "a folder that can be written") from None


def saved_models(output: OutputArguments, output_dir: Optional[str], has_average: bool = False) -> list[str]:
    """The folder of the trained model, from the flags or under `output_dir`; a second one for the average of --ema_beta."""
    if output.no_save or not (output.save_path or output_dir):
        return []
    path = (output.save_path or os.path.join(output_dir, "model")).rstrip("/")
    return [path, f"{path}_ema"] if has_average else [path]


def check_saved_models(output: OutputArguments, saved: list[str], sources: dict[str, Optional[str]]) -> None:
    """Raise UserError if saving would replace anything but an old model. Saving replaces the whole folder.

    `sources` are the flags that name folders of models, comma-separated.
    """
    flag, other = "--save_path", "a new or empty folder, or a model to replace"
    if not output.save_path:
        flag, other = "--output_dir", "another folder, or --save_path"
    for path in saved:
        target = os.path.realpath(path)
        for name, value in {"output_dir": output.output_dir, **sources}.items():
            for folder in filter(None, (value or "").split(",")):
                if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                    raise UserError(flag, f"{path} would replace --{name}", "another folder, or one within it")
        if os.path.isfile(target):
            raise UserError(flag, f"{path} is a file", "a folder")
        if os.path.ismount(target):
            raise UserError(flag, f"{path} is a mount point, which cannot be replaced", "a folder within it")
        held = set(os.listdir(target)) if os.path.isdir(target) else set()
        if held and not held & {"config.json", "adapter_config.json"}:
            raise UserError(flag, f"{path} holds no model", other)
        if held and not (output.save_path or output.overwrite or holds_run(output.output_dir)):
            raise UserError(flag, f"{path} holds a model that no run in --output_dir wrote", other)


def check_mirrors(use_wandb: bool, use_tensorboard: bool) -> None:
    """Raise UserError, with the pip extra, for a requested metrics package that is not installed."""
    for flag, used, package in (("use_wandb", use_wandb, "wandb"), ("use_tensorboard", use_tensorboard, "tensorboard")):
        if used and importlib.util.find_spec(package) is None:
            raise UserError(f"--{flag}", f"{package} is not installed", f"pip install -e '.[{package}]'")


def check_best_metric(key: Optional[str], eval_metrics: tuple[str, ...]) -> None:
    """Raise UserError for a --best_metric_key that no evaluation gives."""
    if key and key not in eval_metrics:
        raise UserError("--best_metric_key", f"{key}, which no evaluation gives", ", ".join(eval_metrics))


def save_policy(checkpoint: CheckpointArguments) -> SavePolicy:
    """When and how to save, from the flags under "Checkpoints"."""
    return SavePolicy(
        save_steps=checkpoint.save_steps,
        interval_minutes=checkpoint.save_interval_minutes,
        max_num=checkpoint.max_ckpt_num,
        max_gigabytes=checkpoint.max_ckpt_mem,
        best_metric_key=checkpoint.best_metric_key,
        portable=checkpoint.ckpt_format == "portable",
        background=checkpoint.async_save,
        hf_weights=checkpoint.save_hf_ckpt,
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


def start_metrics(
    strategy, config: dict, output: OutputArguments, folder: str, checkpoints: Checkpoints, **facts
) -> Optional[MetricsLog]:
    """Write config.yaml and the start row, or the rows of a resume. Returns the log on rank 0, None elsewhere.

    `config` are all flags of the command, flat. `checkpoints` has resumed.
    """
    if not strategy.is_rank_0():
        return None
    progress, config = checkpoints.progress, without_secrets(config)
    goes_on = progress.step > 0 and os.path.exists(os.path.join(folder, METRICS_FILE))
    written = write_config(folder, config, goes_on)
    metrics = MetricsLog(
        folder,
        use_tensorboard=output.use_tensorboard,
        wandb_project=output.wandb_project if output.use_wandb else None,
        run_name=output.run_name,
        config=config,
        wandb_run_id=progress.wandb_run_id,
        needs_whole=output.certificate,
    )
    progress.wandb_run_id = metrics.wandb_run_id
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
        except (OSError, ValueError, yaml.YAMLError):
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


def versions() -> dict[str, str]:
    packages = ["torch", "transformers", "deepspeed", "datasets", "tokenizers", "safetensors"]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}


# --- the trained model

CARD_FLAGS = (
    "pretrain dataset dataset_split max_len train_batch_size max_epochs learning_rate lr_scheduler lr_warmup_ratio "
    "weight_decay seed param_dtype backend"
)


# what says how a method was run, where it is given
METHOD_FLAGS = (
    "preset advantage_estimator reward_func reward_pretrain env loss beta teacher ref_model lora_rank lora_alpha target_modules "
    "load_in_4bit eval_dataset"
)
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
USAGE = """```python
from transformers import {auto_class}, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model, tokenizer = {auto_class}.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
```"""


def save_model(
    strategy, model, tokenizer, path: str, command: str, config: dict, progress: Progress, ledger, output_dir: str
) -> None:
    """Write the trained model and its card, the README.md, to `path` (all ranks)."""
    strategy.save_model(model, tokenizer, path)
    if strategy.is_rank_0():
        write_model_card(path, command, without_secrets(config), progress, ledger, final_values(output_dir))
    strategy.print(f"model saved to {path}")


def final_values(output_dir: str) -> dict[str, float]:
    """The last loss, reward and evaluation of a run, from its metrics.jsonl."""
    last: dict = {}
    with open(os.path.join(output_dir, METRICS_FILE), encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError):  # a line that is not whole
                last |= json.loads(line)
    named = {name: value for name, value in last.items() if name in ("loss", "reward") or name.startswith("eval_")}
    return {name: value for name, value in named.items() if isinstance(value, float) and name != "eval_time"}


def write_model_card(folder: str, command: str, config: dict, progress: Progress, ledger, results: dict) -> None:
    """Write the README.md of a saved model: its base, its data, its flags and its last `results`.

    A command may lack some of CARD_FLAGS.
    """
    facts = {"command": command, **{name: config[name] for name in CARD_FLAGS.split() if name in config}}
    facts |= {name: config[name] for name in METHOD_FLAGS.split() if config.get(name)}
    facts |= {f"final {name}": f"{value:.4g}" for name, value in results.items()}
    facts |= {"steps": progress.step, "skipped steps": progress.skipped_steps, "tokens seen": progress.tokens_seen}
    rows = "".join(f"| {_plain(name)} | {_plain(value)} |\n" for name, value in facts.items())
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    library = "peft" if config["lora_rank"] else "transformers"
    scores = command == "train_rm"
    head = {"base_model": config["pretrain"], "library_name": library, "tags": [command]}
    head["pipeline_tag"] = "text-classification" if scores else "text-generation"
    names = [name.strip() for name in str(config["dataset"]).split(",")]
    if public := [name for name in names if HUB_NAME.fullmatch(name) and not os.path.exists(name)]:
        head["datasets"] = public
    front = yaml.safe_dump(head)
    usage = USAGE.format(auto_class="AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM")
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8", errors="replace") as file:
        file.write(
            f"---\n{front}---\n\n# Trained from {_plain(config['pretrain'])}\n\n| | |\n|---|---|\n{rows}\n"
            f"Data: {_plain(ledger.summary())}.\n\n## Use\n\n{usage}\n\nMade with {packages}.\n"
        )


def _plain(value) -> str:
    """A text in one line of Markdown: no tags, no cells, no links, no control characters."""
    text = "".join(char if char.isprintable() else " " for char in html.escape(str(value), quote=False))
    return re.sub(r"([\\|`\[\]])", r"\\\1", text)

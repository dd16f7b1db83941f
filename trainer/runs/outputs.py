"""The run folder: its name, checks that it may be written, config.yaml and the start of metrics.jsonl."""

import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import time
from typing import Optional

import yaml

from trainer.errors import UserError
from trainer.metrics import METRICS_FILE, MetricsLog

LOCK_FILE = ".lock"
_locks: dict[str, int] = {}  # file descriptors by path: a lock lasts until one is closed


def open_output_dir(strategy, output_dir: Optional[str], command: str, overwrite: bool, resumes: bool) -> str:
    """Return the run folder; rank 0 makes it. Raises UserError if it holds a run that is not resumed or overwritten."""
    from trainer.distributed.collectives import broadcast_object, wait_for_all

    folder = broadcast_object(output_dir or os.path.join("runs", f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"))
    if strategy.is_rank_0():
        _open(folder, overwrite, resumes)
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):  # more than one node
        from trainer.distributed.shared_folder import check_shared_folder

        wait_for_all()
        check_shared_folder("--output_dir", folder, LOCK_FILE)
    return folder


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


def saved_models(args, output_dir: Optional[str]) -> list[str]:
    """The folder of the trained model, from the flags or under `output_dir`. --ema_beta adds one for the average."""
    if args.no_save or not (args.save_path or output_dir):
        return []
    path = (args.save_path or os.path.join(output_dir, "model")).rstrip("/")
    has_average = vars(args).get("ema_beta") is not None  # a flag of train_ppo only
    return [path, f"{path}_ema"] if has_average else [path]


def check_mirrors(use_wandb: bool, use_tensorboard: bool) -> None:
    """Raise UserError, with the pip extra, for a requested metrics package that is not installed."""
    for flag, used, package in (("use_wandb", use_wandb, "wandb"), ("use_tensorboard", use_tensorboard, "tensorboard")):
        if used and importlib.util.find_spec(package) is None:
            raise UserError(f"--{flag}", f"{package} is not installed", f"pip install -e '.[{package}]'")


def check_checkpoint_flags(args, eval_metrics: tuple[str, ...]) -> None:
    """Raise UserError for checkpoint flags that contradict each other, or a metric that no evaluation gives."""
    if args.load_checkpoint and args.overwrite:
        raise UserError("--overwrite", "with --load_checkpoint", "one of them")
    if args.load_checkpoint == "latest" and args.output_dir is None:
        raise UserError("--load_checkpoint", "without --output_dir there is no run to resume", "--output_dir")
    if args.best_metric_key and args.best_metric_key not in eval_metrics:
        allowed = ", ".join(eval_metrics) or "with --eval_dataset"
        raise UserError("--best_metric_key", f"{args.best_metric_key}, which no evaluation gives", allowed)


def save_policy(args):
    """When and how to save, from the flags under "Checkpoints"."""
    from trainer.training.checkpointing import SavePolicy

    return SavePolicy(
        save_steps=args.save_steps,
        interval_minutes=args.save_interval_minutes,
        max_num=args.max_ckpt_num,
        max_gigabytes=args.max_ckpt_mem,
        best_metric_key=args.best_metric_key,
        portable=args.ckpt_format == "portable",
        background=args.async_save,
        hf_weights=args.save_hf_ckpt,
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


def start_metrics(strategy, args, folder: str, progress, **facts) -> Optional[MetricsLog]:
    """Write config.yaml and the start row, or the row of a resume. Returns the log on rank 0, None elsewhere."""
    if not strategy.is_rank_0():
        return None
    config = dataclasses.asdict(args)
    goes_on = progress.step > 0 and os.path.exists(os.path.join(folder, METRICS_FILE))
    if not goes_on:
        with open(os.path.join(folder, "config.yaml"), "w") as file:
            yaml.dump(config, file, ConfigDumper, sort_keys=False)
    metrics = MetricsLog(
        folder,
        use_tensorboard=args.use_tensorboard,
        wandb_project=args.wandb_project if args.use_wandb else None,
        config=config,
        wandb_run_id=progress.wandb_run_id,
    )
    progress.wandb_run_id = metrics.wandb_run_id
    facts = {"config": config, "mesh": dataclasses.asdict(strategy.sizes), "versions": versions(), **facts}
    if strategy.device.type == "cpu":
        from trainer.models.cpu_matmul import chosen

        facts["cpu_matmul"] = chosen()  # the config may only say auto
    if not goes_on:
        metrics.event("start", **facts)
    if progress.step:
        metrics.event("resume", step=progress.step, **(facts if goes_on else {}))
    return metrics


def versions() -> dict[str, str]:
    packages = ["torch", "transformers", "deepspeed", "datasets", "tokenizers", "safetensors"]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}

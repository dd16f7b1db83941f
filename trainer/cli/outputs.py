"""The run folder: its name, whether it may be written, config.yaml and the start of metrics.jsonl."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from typing import Optional

import yaml

from trainer.errors import UserError
from trainer.metrics import METRICS_FILE, MetricsLog


def open_output_dir(strategy, output_dir: Optional[str], command: str, overwrite: bool) -> str:
    """The run folder, made by rank 0; raises UserError if it holds another run and `overwrite` is off."""
    folder = strategy.broadcast_object(
        output_dir or os.path.join("runs", f"{command}-{time.strftime('%Y%m%d-%H%M%S')}")
    )
    if not strategy.is_rank_0():
        return folder
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("--output_dir", f"{folder} is a file", "a folder")
    if os.path.exists(os.path.join(folder, METRICS_FILE)):
        if not overwrite:
            raise UserError("--output_dir", f"{folder} holds another run", "another folder, or --overwrite")
        for name in (METRICS_FILE, "config.yaml", "tensorboard"):
            path = os.path.join(folder, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError("--output_dir", f"{folder}: {error.strerror}") from None
    return folder


def check_mirrors(use_wandb: bool, use_tensorboard: bool) -> None:
    """Raises UserError naming the pip extra of a mirror that is asked for and not installed."""
    for flag, used, package in (("use_wandb", use_wandb, "wandb"), ("use_tensorboard", use_tensorboard, "tensorboard")):
        if used and importlib.util.find_spec(package) is None:
            raise UserError(f"--{flag}", f"{package} is not installed", f"pip install -e '.[{package}]'")


def start_metrics(strategy, args, folder: str, **facts) -> Optional[MetricsLog]:
    """Write config.yaml and the start row; rank 0's log, None elsewhere."""
    if not strategy.is_rank_0():
        return None
    config = dataclasses.asdict(args)
    with open(os.path.join(folder, "config.yaml"), "w") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    project = args.wandb_project if args.use_wandb else None
    metrics = MetricsLog(folder, use_tensorboard=args.use_tensorboard, wandb_project=project, config=config)
    metrics.event("start", config=config, mesh=dataclasses.asdict(strategy.sizes), versions=versions(), **facts)
    return metrics


def versions() -> dict[str, str]:
    packages = ["torch", "transformers", "deepspeed", "datasets", "tokenizers", "safetensors"]
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}

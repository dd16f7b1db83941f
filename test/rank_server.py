"""Starts ranks for tests by forking: `python test/rank_server.py` reads requests, a JSON object on a line each.

A launch by torchrun imports torch, transformers and DeepSpeed on every rank, 8 s of a core each. This process imports
them once, and every command and `datasets`, another second. What a test checks of torchrun itself (signals, exit codes,
leftovers) it starts by `launch.torchrun`.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import datasets

from trainer import entry
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks

ROOT = Path(__file__).resolve().parent.parent


class Left(BaseException):
    """A rank ended itself with an exit code, which would take the pipe to this process with it."""


def leave(code: int) -> None:
    raise Left(code)


def run(arguments: list[str], cache: str | None, cwd: str) -> None:
    """What `python ARGUMENTS` does in `cwd`: a script or `-m module`, and its arguments. `cache` is for data sets."""
    os.chdir(cwd)
    entry.leave = leave
    os.environ.pop("HF_DATASETS_CACHE", None)
    os.environ.update({"HF_DATASETS_CACHE": cache} if cache else {})
    # it has read the variable when it was imported
    datasets.config.HF_DATASETS_CACHE = Path(cache or datasets.config.DEFAULT_HF_DATASETS_CACHE)
    datasets.config.DOWNLOADED_DATASETS_PATH = datasets.config.HF_DATASETS_CACHE / "downloads"
    datasets.config.EXTRACTED_DATASETS_PATH = datasets.config.DOWNLOADED_DATASETS_PATH / "extracted"
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except (Left, SystemExit) as ended:
        if ended.args[0] if ended.args else 0:
            raise RuntimeError(f"exit code {ended.args[0]}") from None


def import_commands() -> None:
    for path in sorted((ROOT / "trainer/cli").glob("[a-z]*.py")):
        importlib.import_module(f"trainer.cli.{path.stem}")
    for name in ("torch.nn.attention.varlen", "trainer.runs.run_training"):
        importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed while importing is no answer
    import_libraries()
    import_commands()
    for line in sys.stdin:
        asked = json.loads(line)
        rank = functools.partial(run, asked["arguments"], asked["cache"], asked["cwd"])
        ending = run_ranks(rank, asked["num_ranks"], Path(asked["log"]), asked["timeout"])
        os.write(answers, (json.dumps({"kind": ending.kind, "text": ending.text}) + "\n").encode())

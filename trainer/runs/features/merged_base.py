"""`--merge_adapter` with `--lora_rank`: the merged model is written into the run folder, and a new adapter is trained on it."""

import os
import subprocess
import sys

from trainer.distributed.collectives import rank_0_alone, wait_for_all
from trainer.errors import UserError
from trainer.flags.groups import with_flags
from trainer.runs.feature import Feature

FOLDER = "base"  # in the run folder; the new adapter names it as its base model


def merge_first(run) -> None:
    """Put the merged model in the place of --pretrain. The update is added in fp32, and written in the dtype of the base.

    A resumed run finds the folder that its first start wrote.
    """
    adapter, base = run.args.lora.lora_adapter, run.setup.folder
    target = os.path.join(os.path.abspath(run.open()), FOLDER)
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

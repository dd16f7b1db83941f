"""Peak memory of a step on FSDP2 with groups for embedding and head, and without, run by test_group_memory.py.

`torchrun group_memory.py FOLDER` trains a model with a large vocabulary twice and writes FOLDER/peaks.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from trainer.cli import train_sft
from trainer.cli.entry import run_command
from trainer.strategies import fsdp2
from trainer.training import loop


def main(argv: list[str]) -> None:
    folder, peaks = Path(argv[0]), {}
    train_step, fully_shard = loop.train_step, fsdp2.fully_shard
    for name in ("split", "whole"):

        def measured(strategy, model, optimizer, *rest, name=name):
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                row = train_step(strategy, model, optimizer, *rest)
            by_device = tracker.get_tracker_snapshot("peak")
            peaks[name] = max(sizes["Total"] for sizes in by_device.values())  # of the last step
            return row

        def without_ends(module, **options):
            return module if type(module) in (torch.nn.Embedding, torch.nn.Linear) else fully_shard(module, **options)

        loop.train_step, fsdp2.fully_shard = measured, fully_shard if name == "split" else without_ends
        train_sft.run(
            ["--pretrain", str(folder / "model"), "--dataset", str(folder / "sft.jsonl"), "--no_save", "--max_steps",
             "2", "--train_batch_size", "4", "--micro_train_batch_size", "2", "--device", "cpu", "--param_dtype", "bf16",
             "--output_dir", str(folder / name)]
        )  # fmt: skip
    if dist.get_rank() == 0:
        (folder / "peaks.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

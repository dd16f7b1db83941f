"""Peak memory of a step on FSDP2 with groups for embedding and head, and without, run by test_group_memory.py.

`torchrun group_memory.py FOLDER VOCABULARY WIDTH LAYERS` trains a Llama with a large vocabulary twice. It prints, and writes to
FOLDER/peaks.json, the peak in bytes and the all-gathers of the last step of each run.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer.cli import train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.distributed import mesh
from trainer.entry import run_command
from trainer.strategies import fsdp2
from trainer.training import loop


def make_model(folder: Path, vocab: int, width: int, layers: int) -> None:
    make_demo(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def main(argv: list[str]) -> None:
    folder, peaks = Path(argv[0]), {}
    mesh.start_process_group(torch.device("cpu"))
    if dist.get_rank() == 0:
        make_model(folder, *map(int, argv[1:]))
    dist.barrier()
    train_step, fully_shard = loop.train_step, fsdp2.fully_shard
    for name in ("split", "whole"):

        def measured(strategy, model, optimizer, *rest, name=name):
            tracker, calls = MemTracker(), CommDebugMode()
            tracker.track_external(model, optimizer)
            with calls, tracker:
                row = train_step(strategy, model, optimizer, *rest)
            by_device = tracker.get_tracker_snapshot("peak")
            gathers = calls.get_comm_counts()[torch.ops.c10d._allgather_base_]
            peaks[name] = max(sizes["Total"] for sizes in by_device.values()), gathers
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
        for name, (peak, gathers) in peaks.items():
            print(f"{name}: {peak / 2**20:.1f} MiB, {gathers} all-gathers")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

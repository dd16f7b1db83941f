"""Profile one training step on one GPU: which kernels take the time, where the host waits, and how large chunks should be.

    python scripts/bench/gpu_step.py [--model 8b] [--backend deepspeed] [--lora_rank 16] [more flags of train_sft]

The model is random, with the shape of Qwen3 1.7B or 8B in bf16. Each size of the loss's chunks gets a run of 8 steps, and the
table has the median of the last 4 with the peak of memory. In the last run, step 3 counts the places where the host waits
(`set_sync_debug_mode`), and step 4 is profiled. `--tiny` only tests the script on a CPU, where nothing waits.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from gpu_speed import QWEN3_1_7B, TINY, make_model, make_random_rows
from torch.profiler import ProfilerActivity, profile

from trainer.cli import train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.entry import run_command
from trainer.models.losses import token_losses
from trainer.training import loop

QWEN3_8B = {
    **QWEN3_1_7B, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
MIB = 2**20
CHUNKS = [128 * MIB, 512 * MIB, 1024 * MIB, 2048 * MIB]
STEPS, LAST = 8, 4
WAITING, PROFILED = 3, 4  # steps of the last run


class Looks:
    """train_step, which looks at two steps of a run."""

    def __init__(self, train_step, on_gpu: bool):
        self.train_step, self.on_gpu, self.step = train_step, on_gpu, 0
        self.waits: Counter = Counter()
        self.table = ""

    def __call__(self, *args, **options):
        self.step += 1
        with contextlib.ExitStack() as stack:
            if self.step == WAITING and self.on_gpu:
                found = stack.enter_context(warnings.catch_warnings(record=True))
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            if self.step == PROFILED:
                kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
                profiled = stack.enter_context(profile(activities=kinds))
            row = self.train_step(*args, **options)
        if self.step == WAITING and self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.waits = Counter(f"{w.filename}:{w.lineno}" for w in found if "synchroniz" in str(w.message))
        if self.step == PROFILED:
            key = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
            self.table = profiled.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=60)
        return row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="test this script on a CPU")
    parser.add_argument("--model", choices=("1.7b", "8b"), default="1.7b", help="the shape (1.7b)")
    args, flags = parser.parse_known_args(argv)
    large = QWEN3_8B if args.model == "8b" else QWEN3_1_7B
    shape, length, device = (TINY, 256, "cpu") if args.tiny else (large, 4096, "cuda")
    with tempfile.TemporaryDirectory() as name:
        folder, train_step = Path(name), loop.train_step
        make_demo(str(folder / "demo"))
        make_random_rows(folder / "long.jsonl", length, num_rows=8 * STEPS)
        make_model(folder / "model", folder / "demo/model", shape, length)
        print("| chunks | step, s | tokens/s | MFU | peak, MiB |\n|---:|---:|---:|---:|---:|", flush=True)
        for size in CHUNKS[:1] if args.tiny else CHUNKS:
            token_losses.CHUNK_BYTES = token_losses.GPU_CHUNK_BYTES = size
            loop.train_step = looks = Looks(train_step, on_gpu=not args.tiny)
            run = folder / f"run-{size}"
            train_sft.run(
                ["--pretrain", str(folder / "model"), "--dataset", str(folder / "long.jsonl"), "--pretrain_mode",
                 "--input_key", "text", "--max_len", str(length), "--train_batch_size", "8", "--micro_train_batch_size", "2",
                 "--max_steps", str(STEPS), "--logging_steps", "1000", "--no_save", "--device", device, "--output_dir", str(run),
                 *flags]
            )  # fmt: skip
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            rows = [row for row in rows if "step_time" in row][-LAST:]
            seconds, tokens = (
                statistics.median(row[key] for row in rows) for key in ("step_time", "tokens_per_second")
            )
            mfu = f"{rows[-1]['mfu']:.2f}" if rows[-1]["mfu"] else "-"
            print(
                f"| {size / MIB:.0f} MiB | {seconds:.3f} | {tokens:.0f} | {mfu} | {rows[-1]['peak_memory_bytes'] / MIB:.0f} |",
                flush=True,
            )
        print(f"\nThe host waits {looks.waits.total()} times in a step of 4 micro-batches:")
        for place, count in looks.waits.most_common():
            print(f"{count} x {place}")
        print(looks.table)


if __name__ == "__main__":
    import sys

    run_command(main, sys.argv[1:])

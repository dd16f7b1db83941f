"""Train under ZeRO 3 with buckets as they are and with tiny ones: `torchrun --nproc_per_node 2 small_buckets.py FOLDER`."""

import sys

from trainer.compare.runs.many_runs import run_here
from trainer.entry import run_command
from trainer.strategies.on_deepspeed import zero_config

DTYPES = ("fp32", "bf16")
SIZES = {"large": zero_config.bucket_elements, "tiny": lambda num_ranks: 1000}  # less than most parameters


def main(argv: list[str]) -> None:
    folder = argv[0]
    for dtype in DTYPES:
        for size, elements in SIZES.items():
            zero_config.bucket_elements = elements
            run_here(
                "train_sft",
                ["--pretrain", f"{folder}/model", "--dataset", f"{folder}/sft.jsonl", "--backend", "deepspeed",
                 "--zero_stage", "3", "--param_dtype", dtype, "--device", "cpu", "--max_steps", "3",
                 "--train_batch_size", "8", "--micro_train_batch_size", "2", "--max_len", "64", "--no_save",
                 "--output_dir", f"{folder}/zero-{dtype}-{size}"],
            )  # fmt: skip


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

"""Measure DPO speed: train_dpo on both backends against TRL's DPOTrainer, in one process.

    python scripts/bench/dpo_speed.py --data ../shared/data [--rounds 5] [--update docs/benchmarks.md]

The model is a random Qwen3 of 5 million parameters in fp32, with a frozen copy as the reference. The data are pairs of
GSM8K answers: 16 pairs per step, 8 in one forward pass, no gradient checkpointing. Each speed compares a long and a
short run: (difference in pairs) / (difference in seconds). The seconds count whole processes.
"""

import json
import sys
import tempfile
from pathlib import Path

from grpo_speed import bench_parser, measure, report
from sft_speed import make_model

PAIRS, MICRO, MAX_LEN = 16, 8, 512
SHORT, LONG = 2, 8  # steps


def train_with_trl(model_folder: str, data: str, steps: int, folder: str) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer
    from trl_loop import FASTEST_ON_CPU

    with open(data) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(PAIRS * LONG))]
    config = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PAIRS // MICRO,
        max_steps=steps,
        max_length=MAX_LEN,
        learning_rate=1e-4,
        train_sampling_strategy="sequential",
        **FASTEST_ON_CPU,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder),
        args=config,
        train_dataset=Dataset.from_list([{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]),
        processing_class=tokenizer,
    ).train()


def command(name: str, model_folder: Path, data: Path, steps: int, folder: Path) -> list[str]:
    if name.startswith("TRL"):
        return [sys.executable, __file__, "--trl", str(model_folder), str(data), str(steps), str(folder)]
    flags = ["--backend", name.split()[1], "--param_dtype", "fp32", "--pretrain", str(model_folder), "--no_save"]
    flags += ["--dataset", str(data), "--max_samples", str(PAIRS * LONG), "--no_shuffle", "--max_len", str(MAX_LEN)]
    flags += ["--train_batch_size", str(PAIRS), "--micro_train_batch_size", str(MICRO), "--max_steps", str(steps)]
    flags += ["--learning_rate", "1e-4", "--output_dir", str(folder), "--overwrite", "--logging_steps", "1000"]
    flags += ["--zero_stage", "1"] if "deepspeed" in name else []
    return [sys.executable, "-m", "trainer.cli.train_dpo", *flags, *(["--packing_samples"] if "packed" in name else [])]


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    parser = bench_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/ and models/stories260K-hf/")
    args = parser.parse_args()
    names = ["train_dpo fsdp2", "train_dpo fsdp2 packed", "TRL DPOTrainer", "train_dpo deepspeed"]
    with tempfile.TemporaryDirectory() as name:
        model, run = Path(name) / "model", Path(name) / "run"
        make_model(model, args.data.resolve() / "models/stories260K-hf")
        pairs = args.data.resolve() / "gsm8k/pairs.jsonl"
        found = measure(
            names,
            lambda name, steps: command(name, model, pairs, steps, run),
            args,
            (SHORT, LONG),
            PAIRS,
            "pairs",
        )
    report("DPO end to end", found, "pairs", "TRL DPOTrainer", args.update)


if __name__ == "__main__":
    main()

"""Measure the speed of a mixture of 16 experts on one CPU rank: train_sft against transformers' plain loop over experts.

    python scripts/bench/experts_speed.py --data ../shared/data [--rounds 3] [--steps 16] [--update docs/benchmarks.md]

A figure is the processor time of a step. Other work on the machine changes it less than it changes the time of a clock.
Each contender runs twice in a round, with few and with many steps. The difference is the time of the further steps.
"""

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from sft_speed import HERE, command_line, machine, make_long_rows, timed, update

FEW = 3  # steps of the shorter run, with the start of the process
TOKENS = 8 * 256


def make_model(folder: Path, tokenizer_folder: Path) -> None:
    """Save a random Qwen3-MoE of 16 experts, 4 for each token: 12 million parameters in experts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, moe_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
        max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def processor_seconds(command: list[str]) -> float:
    """Processor time of a whole process with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    timed(command, threads=1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def contenders(folder: Path, num_steps: int) -> dict[str, list[str]]:
    flags = ["--pretrain", str(folder / "model"), "--dataset", str(folder / "long.jsonl"), "--pretrain_mode"]
    flags += ["--input_key", "text", "--max_len", "256", "--train_batch_size", "8", "--param_dtype", "fp32"]
    flags += ["--learning_rate", "1e-4", "--no_save", "--no_shuffle", "--logging_steps", "1000"]
    flags += ["--output_dir", str(folder / "run")]
    ours = [sys.executable, "-m", "trainer.cli.train_sft", *flags, "--micro_train_batch_size", "8"]
    ours += ["--max_steps", str(num_steps)]
    loop = [sys.executable, str(HERE / "plain_loop.py"), str(num_steps), "8", *flags]
    return {
        "plain loop, experts one after the other": loop,
        "train_sft FSDP2": [*ours, "--backend", "fsdp2"],
        "train_sft FSDP2, `--cpu_matmul mkl`": [*ours, "--backend", "fsdp2", "--cpu_matmul", "mkl"],
        "train_sft DeepSpeed": [*ours, "--backend", "deepspeed", "--zero_stage", "1"],
    }


def measure(data: Path, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Processor seconds of a step in every round, by contender."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", data / "models/stories260K-hf")
        make_long_rows(data / "gsm8k/train.jsonl", folder / "long.jsonl")
        for number in range(rounds):
            for name in contenders(folder, FEW):
                seconds = []
                for steps in (FEW, FEW + num_steps):
                    shutil.rmtree(folder / "run", ignore_errors=True)
                    seconds.append(processor_seconds(contenders(folder, steps)[name]))
                found.setdefault(name, []).append((seconds[1] - seconds[0]) / num_steps)
                print(f"round {number + 1}: {name}: {found[name][-1]:.3f} s a step", flush=True)
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    lines = ["| | processor seconds of a step (median, min to max) | speed / plain loop |", "|---|---:|---:|"]
    plain = next(iter(found.values()))
    for name, times in found.items():
        ratio = statistics.median(other / own for own, other in zip(times, plain))
        spread = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
        lines.append(f"| {name} | {spread} | {ratio:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--update", type=Path, metavar="MD")
    options = parser.parse_args()
    found = measure(options.data, options.rounds, options.steps)
    text = "\n".join(
        [
            "## Mixtures of experts on CPU",
            "",
            f"`{command_line()}`: {machine()}.",
            f"A random Qwen3-MoE of 4 layers with 16 experts, 4 for each token, fp32. A step has {TOKENS} tokens. One thread.",
            "",
            *table(found),
        ]
    )
    print(text)
    if options.update:
        update(options.update, "experts_speed", text)


if __name__ == "__main__":
    main()

"""Measure GRPO end to end on the embedded demo: train_ppo against TRL's GRPOTrainer, in one process.

    python scripts/bench/grpo_speed.py [--rounds 5] [--update docs/benchmarks.md]

Both start from the same model and give 8 answers to each of the same prompts, 128 samples per step. transformers
generates, and the reward is exact match. Each speed compares a long and a short run: (difference in samples) /
(difference in seconds). The seconds count whole processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_speed import ROOT, command_line, machine, timed, update

SAMPLES, GROUP, MAX_NEW = 128, 8, 32
SHORT, LONG = 8, 68  # steps; --compile has compiled everything after the first of them


def train_with_trl(demo: Path, steps: int, folder: Path) -> None:
    """Train with GRPOTrainer's faster options: one generation per step, no gradient checkpointing, no reference model.

    torch_compile is off: it compiled for many steps, and 30 later steps took 1.65 s each. They take 1.1 s without it.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl_loop import FASTEST_ON_CPU

    rows = [json.loads(line) for line in (demo / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "label": row["label"]} for row in rows])

    def exact_match(completions, label, **_) -> list[float]:
        return [float(c[0]["content"].strip() == expected) for c, expected in zip(completions, label)]

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=64,
        gradient_accumulation_steps=SAMPLES // 64,
        num_generations=GROUP,
        max_completion_length=MAX_NEW,
        max_steps=steps,
        learning_rate=2e-4,
        beta=0.0,
        **FASTEST_ON_CPU,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(demo / "model"),
        reward_funcs=exact_match,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(demo / "model"),
    ).train()


def command(name: str, demo: Path, steps: int, folder: Path) -> list[str]:
    if name.startswith("TRL"):
        return [sys.executable, __file__, "--trl", str(demo), str(steps), str(folder)]
    flags = ["--backend", name.split()[1], "--param_dtype", "fp32", "--pretrain", str(demo / "model"), "--no_save"]
    flags += ["--dataset", str(demo / "prompts.jsonl"), "--label_key", "label", "--reward_func", "exact_match"]
    flags += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", str(GROUP), "--max_steps", str(steps)]
    flags += ["--rollout_batch_size", str(SAMPLES // GROUP), "--micro_rollout_batch_size", str(SAMPLES)]
    flags += ["--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "64", "--prompt_max_len", "96"]
    flags += ["--generate_max_len", str(MAX_NEW), "--learning_rate", "2e-4", "--lr_scheduler", "constant"]
    flags += ["--output_dir", str(folder), "--overwrite", "--logging_steps", "1000"]
    flags += ["--compile"] if "compiled" in name else []
    return [sys.executable, "-m", "trainer.cli.train_ppo", *flags]


def bench_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--update", type=Path, help="Markdown file to write the table into")
    return parser


def measure(names: list[str], command, rounds: int, steps: tuple[int, int], per_step: int, unit: str) -> dict:
    """Return the `unit`s per second of every round by name, from the differences of a long and a short run.

    `command(name, steps)` gives the command. A short run of each comes first and does not count: it fills the caches.
    """
    short, long = steps
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        timed(command(name, short), os.cpu_count())
    for number in range(rounds):
        for name in names:
            seconds = [timed(command(name, count), os.cpu_count()) for count in steps]
            found[name].append((long - short) * per_step / (seconds[1] - seconds[0]))
            print(f"round {number + 1}: {name}: {found[name][-1]:.1f} {unit}/s", flush=True)
    return found


def report(title: str, found: dict[str, list[float]], unit: str, other: str, target: Path | None) -> None:
    """Print the table of `measure`, and write it into `target` if given. Ratios to `other` are medians over rounds."""
    script = Path(sys.argv[0]).name
    rounds = len(found[other])
    lines = [f"## {title}", "", f"`{command_line()}`, {rounds} rounds: {machine()}.", ""]
    lines += [f"| | {unit}/s (median, min to max) | / {other.split()[0]} |", "|---|---:|---:|"]
    for name, speeds in found.items():
        ratio = statistics.median(own / its for own, its in zip(speeds, found[other]))
        spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        lines.append(f"| {name} | {spread} | {ratio:.2f} |")
    print("\n".join(lines))
    if target:
        update(target, script.removesuffix(".py"), "\n".join(lines))


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = bench_parser(__doc__)
    args = parser.parse_args()
    names = ["train_ppo fsdp2", "train_ppo fsdp2 compiled", "TRL GRPOTrainer", "train_ppo deepspeed"]
    names += ["train_ppo deepspeed compiled"]
    with tempfile.TemporaryDirectory() as name:
        demo, folder = Path(name) / "demo", Path(name) / "run"
        make_demo = [sys.executable, "-m", "trainer.cli.make_demo", "--output_dir", str(demo)]
        subprocess.run(make_demo, check=True, cwd=ROOT, capture_output=True)
        found = measure(
            names,
            lambda name, steps: command(name, demo, steps, folder),
            args.rounds,
            (SHORT, LONG),
            SAMPLES,
            "samples",
        )
    report("GRPO end to end", found, "samples", "TRL GRPOTrainer", args.update)


if __name__ == "__main__":
    main()

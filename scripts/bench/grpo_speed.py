"""Measure GRPO end to end: train_ppo against TRL's GRPOTrainer, in one process.

    python scripts/bench/grpo_speed.py [--rounds 5] [--update docs/benchmarks.md]
    python scripts/bench/grpo_speed.py --pretrain my_smollm2 --rounds 3

Both start from the same model and give 8 answers to each of the same prompts. transformers generates. Without
--pretrain, this is the embedded demo with exact match, 128 samples per step. A real model answers the orders of
scripts/orders_task.py, 32 samples per step. Each speed compares a long and a short run: (difference in samples) /
(difference in seconds). The seconds count whole processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sft_speed import ROOT, command_line, machine, processor_seconds, timed, update

GROUP = 8


@dataclass(frozen=True)
class Job:
    samples: int  # of a step
    micro: int
    max_new: int
    steps: tuple[int, int]  # of the short and the long run; --compile has compiled everything after the short one
    reward: str
    compiled: bool


JOBS = {
    "demo": Job(128, 64, 32, (8, 68), "exact_match", compiled=True),
    "real": Job(32, 16, 48, (1, 3), str(ROOT / "scripts/orders_task.py"), compiled=False),
}


def reward_of(job: Job):
    """The reward of TRL for this job: a function of the completions and their labels."""
    if job.reward == "exact_match":
        return lambda texts, labels: [float(text.strip() == label) for text, label in zip(texts, labels)]
    sys.path.insert(0, str(ROOT / "scripts"))
    from orders_task import reward_func

    return lambda texts, labels: reward_func(None, texts, labels)


def train_with_trl(job: Job, demo: Path, steps: int, folder: Path) -> None:
    """Train with GRPOTrainer's faster options: one generation per step, no gradient checkpointing, no reference model.

    torch_compile is off: it compiled for many steps, and 30 later steps took 1.65 s each. They take 1.1 s without it.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl_loop import FASTEST_ON_CPU

    rows = [json.loads(line) for line in (demo / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "label": row["label"]} for row in rows])

    score = reward_of(job)

    def reward(completions, label, **_) -> list[float]:
        return score([completion[0]["content"] for completion in completions], label)

    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=job.micro,
        gradient_accumulation_steps=job.samples // job.micro,
        num_generations=GROUP,
        max_completion_length=job.max_new,
        max_steps=steps,
        learning_rate=2e-4,
        beta=0.0,
        **FASTEST_ON_CPU,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(demo / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(demo / "model"),
    ).train()


def command(job_name: str, name: str, demo: Path, steps: int, folder: Path) -> list[str]:
    job = JOBS[job_name]
    if name.startswith("TRL"):
        return [sys.executable, __file__, "--trl", job_name, str(demo), str(steps), str(folder)]
    flags = ["--backend", name.split()[1], "--param_dtype", "fp32", "--pretrain", str(demo / "model"), "--no_save"]
    flags += ["--dataset", str(demo / "prompts.jsonl"), "--label_key", "label", "--reward_func", job.reward]
    flags += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", str(GROUP), "--max_steps", str(steps)]
    flags += ["--rollout_batch_size", str(job.samples // GROUP), "--micro_rollout_batch_size", str(job.samples)]
    flags += ["--train_batch_size", str(job.samples), "--micro_train_batch_size", str(job.micro)]
    flags += [
        "--prompt_max_len",
        "128",
        "--generate_max_len",
        str(job.max_new),
        "--learning_rate",
        "2e-4",
        "--lr_scheduler",
        "constant",
    ]
    flags += ["--output_dir", str(folder), "--overwrite", "--logging_steps", "1000"]
    flags += ["--compile"] if "compiled" in name else []
    return [sys.executable, "-m", "trainer.cli.train_ppo", *flags]


def bench_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one_thread", action="store_true", help="one thread, and seconds of the processor")
    parser.add_argument("--update", type=Path, help="Markdown file to write the table into")
    return parser


def measure(
    names: list[str], command, args: argparse.Namespace, steps: tuple[int, int], per_step: int, unit: str
) -> dict:
    """Return the `unit`s per second of every round by name, from the differences of a long and a short run.

    `command(name, steps)` gives the command. A short run of each comes first and does not count: it fills the caches.
    With --one_thread, other work on the machine hardly changes the figures, and no run is left out.
    """
    short, long = steps
    how = (1, processor_seconds) if args.one_thread else (os.cpu_count(), time.perf_counter)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in [] if args.one_thread else names:
        timed(command(name, short), *how)
    for number in range(args.rounds):
        for name in names:
            seconds = [timed(command(name, count), *how) for count in steps]
            found[name].append((long - short) * per_step / (seconds[1] - seconds[0]))
            print(f"round {number + 1}: {name}: {found[name][-1]:.1f} {unit}/s", flush=True)
    return found


def report(
    title: str, found: dict[str, list[float]], unit: str, other: str, target: Path | None, variant: str = ""
) -> None:
    """Print the table of `measure`, and write it into `target` if given. Ratios to `other` are medians over rounds.

    `variant` is the end of the section's name: each set of options has its own section.
    """
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
        update(target, script.removesuffix(".py") + variant, "\n".join(lines))


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(JOBS[sys.argv[2]], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        return
    parser = bench_parser(__doc__)
    parser.add_argument("--pretrain", type=Path, help="a real model, for the orders of scripts/orders_task.py")
    args = parser.parse_args()
    job_name = "real" if args.pretrain else "demo"
    job = JOBS[job_name]
    names = ["train_ppo fsdp2", "TRL GRPOTrainer", "train_ppo deepspeed"]
    names += ["train_ppo fsdp2 compiled", "train_ppo deepspeed compiled"] if job.compiled else []
    with tempfile.TemporaryDirectory() as name:
        demo, folder = Path(name) / "demo", Path(name) / "run"
        make_data = ["-m", "trainer.cli.make_demo", "--output_dir", str(demo)]
        if args.pretrain:
            make_data = [str(ROOT / "scripts/orders_task.py"), str(demo)]
        subprocess.run([sys.executable, *make_data], check=True, cwd=ROOT, capture_output=True)
        if args.pretrain:
            (demo / "model").symlink_to(args.pretrain.resolve())
        found = measure(
            names,
            lambda name, steps: command(job_name, name, demo, steps, folder),
            args,
            job.steps,
            job.samples,
            "samples",
        )
    title = f"GRPO of {args.pretrain.name}" if args.pretrain else "GRPO end to end"
    report(title, found, "samples", "TRL GRPOTrainer", args.update, "_real" if args.pretrain else "")


if __name__ == "__main__":
    main()

"""Check if the cost of a step grows with the data set or with the number of steps: growing sets, and one long run.

    python scripts/bench/scaling.py [--rows 1000 10000 100000] [--steps 1000] [--long 2000]
        [--update docs/benchmarks.md]

train_sft trains a tiny random Qwen3 on random words, so that reading, batching and logging have a large share. The
first table has the median step and the seconds before the first step. The second has steps and memory of the long run,
by tenths.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_speed import ROOT, machine, timed, update


def make_data(folder: Path, num_rows: int) -> Path:
    """Write rows with a question and an answer of 5 to 40 words each, from the demo's vocabulary."""
    generator, path = random.Random(0), folder / f"rows_{num_rows}.jsonl"
    words = ["sort", "these", "digits", "and", "letters", "now", *list("0123456789")]
    with open(path, "w") as file:
        for _ in range(num_rows):
            question, answer = (" ".join(generator.choices(words, k=generator.randint(5, 40))) for _ in "qa")
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    return path


def run(folder: Path, backend: str, data: Path, steps: int) -> tuple[float, list[dict]]:
    """Return (seconds outside the steps, rows of the steps) of one run. Its data cache is empty at the start."""
    command = [sys.executable, "-m", "trainer.cli.train_sft", "--backend", backend, "--dataset", str(data)]
    command += ["--pretrain", str(folder / "demo/model"), "--input_key", "question", "--output_key", "answer"]
    command += ["--train_batch_size", "4", "--micro_train_batch_size", "4", "--max_steps", str(steps), "--no_save"]
    command += [
        "--param_dtype",
        "fp32",
        "--logging_steps",
        "100000",
        "--output_dir",
        str(folder / "run"),
        "--overwrite",
    ]
    wall = timed(command, 1, HF_DATASETS_CACHE=tempfile.mkdtemp(dir=folder))
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_time" in row]
    return wall - sum(row["step_time"] for row in rows), rows


def per_token(rows: list[dict]) -> float:
    """Median microseconds of a step per token."""
    return statistics.median(1e6 / row["tokens_per_second"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp2", choices=["fsdp2", "deepspeed"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps of the run on the smallest set; the others take 200"
    )
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--update", type=Path, help="Markdown file to write the tables into")
    args = parser.parse_args()
    lines = ["## Scaling", "", f"`python scripts/bench/scaling.py --backend {args.backend}`: {machine()}.", ""]
    lines += ["| rows | microseconds per token (median step) | before the first step, s |", "|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "trainer.cli.make_demo", "--output_dir", str(folder / "demo")],
            check=True,
            cwd=ROOT,
            capture_output=True,
        )
        for number, num_rows in enumerate(args.rows):
            outside, rows = run(folder, args.backend, make_data(folder, num_rows), 200 if number else args.steps)
            if not number:
                parts = [per_token(rows[10:110]), per_token(rows[-100:])]
                rows = rows[:200]
            lines.append(f"| {num_rows} | {per_token(rows[10:]):.1f} | {outside:.1f} |")
        lines += [
            "",
            f"Steps 11 to 110 of {args.steps}: {parts[0]:.1f} microseconds per token; the last 100: {parts[1]:.1f}.",
            "",
        ]
        _, rows = run(folder, args.backend, make_data(folder, args.rows[0]), args.long)
        lines += ["| steps | microseconds per token | peak host memory MiB |", "|---|---:|---:|"]
        tenth = args.long // 10
        for first in range(0, args.long, tenth):
            part = rows[first : first + tenth]
            memory = part[-1]["peak_memory_bytes"] / 2**20
            lines.append(f"| {first + 1} to {first + tenth} | {per_token(part):.1f} | {memory:.1f} |")
    print("\n".join(lines))
    if args.update:
        update(args.update, f"scaling_{args.backend}", "\n".join(lines))


if __name__ == "__main__":
    main()

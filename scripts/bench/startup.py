"""Measure the time from the start of torchrun to the first step on the demo, against the bare import of libraries.

    python scripts/bench/startup.py [--rounds 5] [--update docs/benchmarks.md]

The bare import is a process that only imports libraries: torch, and transformers with the classes of a model and a
tokenizer. For the deepspeed backend it also imports deepspeed. Both measurements take turns. A ratio compares runs of
the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sft_speed import ROOT, environment, machine, timed, update

BARE = "import torch, transformers; from transformers import AutoTokenizer, Qwen3ForCausalLM"
IMPORTS = {"fsdp2": BARE, "deepspeed": f"{BARE}; import deepspeed"}


def seconds_to_first_step(backend: str, demo: Path, folder: Path) -> float:
    """Seconds until metrics.jsonl has the row of the first step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command += ["-m", "trainer.cli.train_sft", "--backend", backend, "--pretrain", str(demo / "model")]
    command += ["--dataset", str(demo / "sft.jsonl"), "--apply_chat_template", "--max_len", "128"]
    command += ["--max_steps", "1", "--no_save", "--output_dir", str(folder), "--overwrite"]
    started, metrics = time.time(), folder / "metrics.jsonl"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(1), **quiet)
    rows: list[dict] = []
    while not any("loss" in row for row in rows):
        if process.poll() not in (None, 0):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        time.sleep(0.02)
        is_new = metrics.exists() and metrics.stat().st_mtime > started
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if is_new else []
    found = time.time() - started
    process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--update", type=Path, help="Markdown file to write the table into")
    args = parser.parse_args()
    bare: dict[str, list[float]] = {backend: [] for backend in IMPORTS}
    step: dict[str, list[float]] = {backend: [] for backend in IMPORTS}
    with tempfile.TemporaryDirectory() as name:
        demo = Path(name) / "demo"
        make_demo = [sys.executable, "-m", "trainer.cli.make_demo", "--output_dir", str(demo)]
        timed(make_demo, 1)
        for number in range(args.rounds):
            for backend, statement in IMPORTS.items():
                bare[backend].append(timed([sys.executable, "-c", statement], 1))
                step[backend].append(seconds_to_first_step(backend, demo, Path(name) / backend))
                print(
                    f"round {number + 1}: {backend}: {bare[backend][-1]:.2f} s, {step[backend][-1]:.2f} s", flush=True
                )
    lines = ["## Start-up", "", f"`python scripts/bench/startup.py`, {args.rounds} rounds: {machine()}.", ""]
    lines += ["| | bare import, s | first step, s | ratio |", "|---|---:|---:|---:|"]
    for backend in IMPORTS:
        ratio = statistics.median(own / other for own, other in zip(step[backend], bare[backend]))
        medians = f"{statistics.median(bare[backend]):.2f} | {statistics.median(step[backend]):.2f}"
        lines.append(f"| {backend} | {medians} | {ratio:.2f} |")
    print("\n".join(lines))
    if args.update:
        update(args.update, "startup", "\n".join(lines))


if __name__ == "__main__":
    main()

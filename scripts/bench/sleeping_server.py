"""Samples per second from a server that only sleeps, by how slots are filled: python scripts/bench/sleeping_server.py

The server has 8 slots. A response takes a log-normal time with a median of 0.06 s, and costs no core. `train_ppo` trains
the demo on 10 rollouts of 32 samples, three times for each way. Episodes have one turn, and all ways have the same seeds.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

from fake_engine import FakeServer  # noqa: E402

from trainer.datasets.demos.demo import make_demo  # noqa: E402

RUNS, ROLLOUTS, SAMPLES, SLOTS = 3, 10, 32, 8
WAYS = {
    "lock step": ["--max_staleness", "0"],
    "in batches": ["--max_staleness", "2", "--tis_cap", "2", "--env_lockstep"],
    "refilled slots": ["--max_staleness", "2", "--tis_cap", "2"],
    "refilled slots, `--partial_rollouts`": ["--max_staleness", "2", "--tis_cap", "2", "--partial_rollouts"],
}
TALKER = """
class Environment:
    def reset(self, task):
        return task["messages"]

    def step(self, response):
        return sum(map(ord, response)) % 7 / 7, True
"""


def seconds(seed: int) -> float:
    return 0.06 * random.Random(seed).lognormvariate(0, 1)


def run(folder: Path, name: str, more: list[str]) -> tuple[float, float]:
    """Samples per second between the ends of the second and the last rollout, and the mean staleness."""
    server, output = FakeServer(seconds=seconds), folder / name
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--env", f"{folder}/talker.py", "--param_dtype", "fp32", "--no_save", "--rollout_engine", "vllm_server"]
    line += ["--engine_urls", server.url, "--max_logprob_diff", "inf", "--advantage_estimator", "group_norm"]
    line += ["--prompt_max_len", "64", "--generate_max_len", "8", "--rollout_batch_size", "8", "--timeline"]
    line += ["--n_samples_per_prompt", "4", "--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "32"]
    line += ["--micro_rollout_batch_size", str(SLOTS), "--max_steps", str(ROLLOUTS), "--output_dir", str(output)]
    command = [sys.executable, "-m", "trainer.cli.train_ppo", *line, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(row) for row in (output / "metrics.jsonl").open()]
    stale = statistics.mean(row.get("staleness", 0) for row in rows if "loss" in row)
    events = json.loads((output / "timeline.json").read_text())
    ends = sorted(event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["name"] == "train")
    return (ROLLOUTS - 2) * SAMPLES / ((ends[-1] - ends[1]) / 1e6), stale


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        (folder / "talker.py").write_text(TALKER)
        print("| way | samples per second | mean staleness |\n|---|---:|---:|")
        for number, (way, more) in enumerate(WAYS.items()):
            found = [run(folder, f"{number}-{again}", more) for again in range(RUNS)]
            speed, stale = (statistics.median(values) for values in zip(*found))
            print(f"| {way} | {speed:.0f} | {stale:.1f} |", flush=True)


if __name__ == "__main__":
    main()

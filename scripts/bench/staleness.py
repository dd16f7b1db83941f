"""Speed and held-out accuracy of --max_staleness 2 against lock step: python scripts/bench/staleness.py

SFT on the embedded demo runs until about half of the answers are right. Then GRPO trains 60 rollouts of 128 samples on
2 ranks, from three seeds. A batch of responses and an optimizer step each take 2 s more, as on other machines. These
delays cost no core. It takes 25 minutes on 2 quiet cores.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS, WARM, SAMPLES, DELAY, SEEDS = 60, 4, 128, "2", (1, 2, 3)
WAYS = {"0": [], "2": ["--max_staleness", "2", "--tis_cap", "2"]}


def torchrun(*words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)


def flags(folder: Path, way: str, seed: int) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/sft/model", "--dataset", "demo/prompts.jsonl"]
    line += ["--label_key", "label", "--reward_func", "exact_match", "--param_dtype", "fp32", "--no_save"]
    line += ["--eval_dataset", "demo/prompts_eval.jsonl", "--eval_steps", str(ROLLOUTS), "--seed", str(seed)]
    line += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "8", "--rollout_batch_size", "16"]
    line += ["--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "64", "--micro_rollout_batch_size", "64"]
    line += ["--prompt_max_len", "96", "--generate_max_len", "32", "--learning_rate", "2e-4"]
    line += ["--lr_scheduler", "constant", "--num_episodes", "99", "--max_steps", str(ROLLOUTS)]
    return ["train_ppo", *line, "--output_dir", f"{folder}/{way}-{seed}", *WAYS[way]]


def table(folder: Path) -> str:
    lines = [
        "| staleness | held-out accuracy by seed | mean | mean staleness | seconds a rollout | samples per second |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for way in WAYS:
        right, stale, seconds = [], [], []
        for seed in SEEDS:
            rows = [json.loads(line) for line in (folder / f"{way}-{seed}/metrics.jsonl").open()]
            steps = [row for row in rows if "loss" in row]
            right.append(100 * [row["eval_reward"] for row in rows if "eval_reward" in row][-1])
            stale.append(statistics.mean(row.get("staleness", 0) for row in steps))
            seconds.append((steps[-1]["time"] - steps[WARM - 1]["time"]) / (ROLLOUTS - WARM))
        each, of_one = ", ".join(f"{share:.1f}" for share in right), statistics.median(seconds)
        speed = f"{of_one:.2f} | {SAMPLES / of_one:.0f}"
        lines.append(f"| {way} | {each} % | {statistics.mean(right):.1f} % | {statistics.mean(stale):.1f} | {speed} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sft = ["-m", "trainer.cli.train_sft", "--backend", "fsdp2", "--param_dtype", "fp32", "--max_steps", "150"]
        torchrun(*sft, "--output_dir", f"{folder}/sft")
        lines = [flags(folder, way, seed) for seed in SEEDS for way in WAYS]
        (folder / "lines.json").write_text(json.dumps(lines))
        torchrun("test/slow_engine.py", DELAY, DELAY, f"{folder}/lines.json")
        print(table(folder))


if __name__ == "__main__":
    main()

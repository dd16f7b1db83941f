"""Draw the reward curves of train_ppo runs: python scripts/plot_rewards.py out.png RUN [RUN ...]"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def read(run: str) -> tuple[list[tuple], list[tuple]]:
    """Return lists of (step, mean reward of samples) and (step, held-out accuracy), without steps before a resume."""
    rows = []
    for row in map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines()):
        if row.get("event") in ("start", "resume"):
            rows = [kept for kept in rows if kept["step"] <= row.get("step", 0)]
        rows += [row] * ("event" not in row)
    sampled = [(row["step"], row["reward"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]
    return sampled, held_out


def main(path: str, runs: list[str]) -> None:
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        sampled, held_out = read(run)
        name = Path(run).name
        axes.plot(*zip(*sampled), color=f"C{number}", alpha=0.35, label=f"{name}: samples of the rollout")
        axes.plot(*zip(*held_out), color=f"C{number}", marker="o", label=f"{name}: held-out prompts, greedy")
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

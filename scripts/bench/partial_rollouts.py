"""Staleness and speed of --partial_rollouts, against responses of one version: python scripts/bench/partial_rollouts.py

The demo trains 40 rollouts on one process. An engine's token takes 40 ms more and an optimizer step 100 ms more, as on other
machines. These delays cost no core.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from trainer.compare.runs import many_runs
from trainer.datasets.demos.demo import make_demo
from trainer.methods import ppo
from trainer.rollout.engines.responses import Responses

REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""
ROLLOUTS, WARM = 40, 4
WAYS = {"lock step": [], "one version": ["--max_staleness", "2"]}
WAYS["partial"] = [*WAYS["one version"], "--partial_rollouts"]


def flags(folder: Path, name: str) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--label_key", "label", "--reward_func", f"{folder}/reward.py", "--param_dtype", "fp32", "--no_save"]
    line += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4", "--rollout_batch_size", "4"]
    line += ["--train_batch_size", "16", "--micro_train_batch_size", "16", "--micro_rollout_batch_size", "16"]
    line += ["--prompt_max_len", "64", "--generate_max_len", "24", "--learning_rate", "1e-3", "--tis_cap", "2"]
    line += ["--num_episodes", "99", "--max_steps", str(ROLLOUTS), "--output_dir", f"{folder}/{name}"]
    return ["train_ppo", *line, *WAYS[name]]


def main() -> None:
    append, update_actor, times = Responses.append, ppo.update_actor, []

    def slow_append(*arguments):
        time.sleep(0.04)
        return append(*arguments)

    def slow_update(*arguments) -> dict:
        time.sleep(0.1)
        times.append(time.perf_counter())
        return update_actor(*arguments)

    Responses.append, ppo.update_actor = slow_append, slow_update
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        (folder / "reward.py").write_text(REWARD)
        (folder / "lines.json").write_text(json.dumps([flags(folder, way) for way in WAYS]))
        many_runs.main([f"{folder}/lines.json"])
        for number, way in enumerate(WAYS):
            rows = [json.loads(line) for line in (folder / way / "metrics.jsonl").open()]
            rows = [row for row in rows if "loss" in row][WARM:]
            mine = times[number * ROLLOUTS : (number + 1) * ROLLOUTS][WARM - 1 :]
            seconds = statistics.mean(after - before for before, after in itertools.pairwise(mine))
            stale, resumed, ess = (
                statistics.mean(row.get(key, 0) for row in rows)
                for key in ("staleness", "resumed_fraction", "rollout_ess")
            )
            worst = max(row.get("staleness_max", 0) for row in rows)
            print(f"| {way} | {seconds:.2f} s | {stale:.2f} | {worst} | {resumed:.0%} | {ess:.3f} |", file=sys.stderr)


if __name__ == "__main__":
    main()

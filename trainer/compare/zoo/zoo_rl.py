"""The cell `rl` of the zoo and of `check`: one step of train_ppo on a tiny model, with the hf engine."""

import json
from collections.abc import Callable
from pathlib import Path

from trainer.compare.machines.forked_ranks import Ending, run_ranks
from trainer.compare.runs.many_runs import run_here
from trainer.compare.runs.matrix import Configuration

RL = Configuration("rl", 1, ("train_ppo", "--rollout_engine", "hf"))
# on the same weights, in fp32, the rollout engine and the policy give the same log-probs
MAX_ROLLOUT_KL = 1e-6
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(character.isdigit() for character in response) for response in responses]
"""
PPO = """--reward_func {reward} --label_key label --apply_chat_template --param_dtype fp32 --max_samples 8 --no_save
    --prompt_max_len 64 --generate_max_len 8 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8
    --micro_train_batch_size 2 --advantage_estimator reinforce --max_steps 1 --learning_rate 1e-3 --backend fsdp2"""


def run_rl(cell: Configuration, flags: Callable, folder: Path, timeout: float) -> Ending:
    """Train the model of `folder`/model on the prompts of the demo. `flags`, those of train_sft, are not used."""
    (folder / "reward.py").write_text(REWARD)
    line = ["--pretrain", f"{folder}/model", "--dataset", f"{folder.parent}/demo/prompts.jsonl"]
    line += [*PPO.format(reward=folder / "reward.py").split(), "--output_dir", f"{folder}/{cell.name}"]
    return run_ranks(lambda: run_here("train_ppo", line), cell.nproc, folder / f"{cell.name}.log", timeout)


def judge_rl(cell: Configuration, ending: Ending, folder: Path) -> tuple[str, str]:
    """(verdict, note) of a finished run."""
    if ending.kind != "done":
        return ("refused" if ending.kind == "refused" else "crash"), ending.text
    rows = map(json.loads, (folder / cell.name / "metrics.jsonl").read_text().splitlines())
    row = next(row for row in rows if "rollout_kl" in row)
    if not abs(row["rollout_kl"]) <= MAX_ROLLOUT_KL:
        return "wrong", f"rollout_kl {row['rollout_kl']:.3g}: the engine computes other log-probs than the policy"
    return "pass", f"rollout_kl {row['rollout_kl']:.1g}"

"""The cells of the zoo and of `check` that train and judge in their own way: `rl`, `exact` and `exact-split`.

`rl` is one step of train_ppo on a tiny model, with the hf engine. The other two ask whether the layouts of `--exact`
give a tiny model the same bits.
"""

import json
from collections.abc import Callable
from pathlib import Path

from trainer.compare.machines.forked_ranks import Ending, run_ranks
from trainer.compare.runs.exact_bits import bits_of, first_difference
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


def judge_rl(cell: Configuration, folder: Path) -> tuple[str, str]:
    """(verdict, note) of a finished run."""
    rows = map(json.loads, (folder / cell.name / "metrics.jsonl").read_text().splitlines())
    row = next(row for row in rows if "rollout_kl" in row)
    if not abs(row["rollout_kl"]) <= MAX_ROLLOUT_KL:
        return "wrong", f"rollout_kl {row['rollout_kl']:.3g}: the engine computes other log-probs than the policy"
    return "pass", f"rollout_kl {row['rollout_kl']:.1g}"


EXACT = Configuration("exact", 2, ("--exact",))
EXACT_SPLIT = Configuration("exact-split", 2, ("--exact",))
FIRST = "exact-1r"  # what the others are compared with
FSDP2 = ("--backend", "fsdp2")
LAYOUTS = {
    EXACT: {FIRST: (1, FSDP2), "exact-zero3-2r": (2, ("--backend", "deepspeed", "--zero_stage", "3"))},
    EXACT_SPLIT: {
        "exact-tp2": (2, (*FSDP2, "--tensor_parallel_size", "2")),
        "exact-ring2": (2, (*FSDP2, "--ring_attn_size", "2")),
    },
}


def run_exact(cell: Configuration, flags: Callable[[str], list[str]], folder: Path, timeout: float) -> Ending:
    """Train on each layout of a cell, and on `FIRST`. `flags` gives those of a run by its name.

    The ending is that of the first run that does not end well, else of the last one.
    """
    seconds = 0.0
    for run, (nproc, layout) in ({FIRST: LAYOUTS[EXACT][FIRST]} | LAYOUTS[cell]).items():
        if (folder / run / "parity").exists():
            continue
        line = [*flags(run), *layout, "--no_save", "--exact", "--device", "cpu"]
        ending = run_ranks(lambda line=line: run_here("train_sft", line), nproc, folder / f"{run}.log", timeout)
        seconds += ending.seconds
        if ending.kind != "done":
            break
    return Ending(ending.kind, ending.text, seconds)


def judge_exact(cell: Configuration, folder: Path) -> tuple[str, str]:
    """(verdict, note) of the runs of a cell."""
    first = bits_of(folder / FIRST)
    for run in LAYOUTS[cell]:
        if difference := first_difference(first, bits_of(folder / run)):
            return "wrong", f"{run}: {difference}"
    return "pass", f"losses {first.of_curve('loss')}"

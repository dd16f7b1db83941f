"""SIGKILL of train_ppo in every phase of a rollout, of one rank or of everything; then the same command again.

    python test/kill_ppo.py --backend fsdp2|deepspeed [--zero_stage N] [--count 12] [--seed 0] [--phases generate sync ...]
        [--async_save] [--max_staleness K]

Runs of PPO with a critic on 2 ranks are killed `count` times in all, in one phase after the other, by the reward file
`killing_reward.py`, which reads the stack of its own process and says where the kill hit. Every joined curve must be
bitwise that of the undisturbed run, so must the samples; and after the death of one rank all must be gone within 30 s.
With --max_staleness two runs differ. There, every prompt must be trained as often as in the undisturbed run and in its
order, no sample may be older than K, and a replay of the run's own samples must be the run to the bit.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from kill_test import GONE_WITHIN_SECONDS, RANKS, start
from killing_reward import AHEAD, LOCK_STEP, PHASES
from launch import ROOT, SHORT_ROLLOUTS, read_rows, read_steps, torchrun

from trainer.datasets.demos.demo import make_demo
from trainer.rollout.rollouts_file import read_rollouts

STEPS, SAVE_STEPS = 16, 4  # two steps to a rollout: every second one is followed by a checkpoint
SAME = (
    "loss grad_norm lr value_loss critic_grad_norm reward reward_std kl kl_coef weights_checksum batch_hash tokens_seen"
)


def command_line(folder: Path, name: str, flags: list[str]) -> list[str]:
    """Flags of train_ppo: PPO with a critic, an adaptive KL, running moments of the rewards: all that a state can hold."""
    demo = folder / "demo"
    line = ["--pretrain", f"{demo}/model", "--dataset", f"{demo}/prompts.jsonl", "--label_key", "label"]
    line += [
        "--reward_func",
        f"{folder}/killing_reward.py",
        "--param_dtype",
        "fp32",
        "--max_samples",
        "24",
        "--no_save",
    ]
    line += [*SHORT_ROLLOUTS, "--num_episodes", "2"]
    line += ["--n_samples_per_prompt", "2", "--train_batch_size", "4", "--micro_train_batch_size", "2"]
    line += ["--advantage_estimator", "gae", "--normalize_reward", "--init_kl_coef", "0.05", "--kl_target", "1"]
    line += ["--learning_rate", "1e-3", "--max_steps", str(STEPS), "--max_ckpt_num", "2"]
    return [*line, "--save_steps", str(SAVE_STEPS), "--output_dir", str(folder / name), *flags]


def prepare(folder: Path) -> None:
    make_demo(str(folder / "demo"))
    shutil.copy(ROOT / "test/killing_reward.py", folder)


def kills_of(folder: Path) -> list[dict]:
    path = folder / "kills.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def killed_run(folder: Path, name: str, flags: list[str], plans: list[dict]) -> list[dict]:
    """Kill the run as each plan says, then let it end; returns the kills, which are fewer where the run ended before."""
    arguments, log = (
        ["-m", "trainer.cli.train_ppo", *command_line(folder, name, flags), "--load_checkpoint"],
        folder / f"{name}.log",
    )
    before, plan_file = len(kills_of(folder)), folder / "plan.json"
    for plan in [*plans, None]:
        plan_file.unlink(missing_ok=True)
        if plan:
            plan_file.write_text(json.dumps(plan))
        known = len(kills_of(folder))
        code = start(arguments, log).wait(timeout=300)
        kills = kills_of(folder)[known:]
        if not kills:
            assert code == 0, f"{name} failed:\n{log.read_text()[-5000:]}"
            break
        seconds = time.time() - kills[0]["time"]
        assert seconds < GONE_WITHIN_SECONDS, f"{seconds:.0f} s until all were gone"
        victim = "all" if plan["victim"] == "all" else f"rank {plan['victim']}, all gone after {seconds:.1f} s"
        print(f"{name}: killed in {plan['phase']} at {kills[0]['where']}: {victim}", flush=True)
    plan_file.unlink(missing_ok=True)
    return kills_of(folder)[before:]


def assert_same_run(folder: Path, name: str, undisturbed: str) -> None:
    """Every number of the rows and every sample, bit for bit, and nothing half-written left."""
    expected, rows = read_steps(folder / undisturbed), read_steps(folder / name)
    assert len(rows) == len(expected) == STEPS
    for row, other in zip(rows, expected):
        for key in SAME.split():
            assert row[key] == other[key], (name, row["step"], key, row[key], other[key])
    assert len({row["weights_checksum"] for row in rows}) == STEPS // 2, "a policy that does not move proves nothing"
    assert read_rollouts(f"{folder}/{name}/rollouts.jsonl") == read_rollouts(f"{folder}/{undisturbed}/rollouts.jsonl")
    stray = list((folder / name).rglob("*.tmp"))
    assert not stray, stray


def assert_sound_ahead(folder: Path, name: str, flags: list[str], bound: int) -> None:
    """No prompt twice or left out, no sample too old, and a replay in lock step that is the run to the bit."""
    rollouts, expected = (read_rollouts(f"{folder}/{run}/rollouts.jsonl") for run in (name, "undisturbed"))
    assert [[s.row for s in samples] for samples in rollouts] == [[s.row for s in samples] for samples in expected]
    for number, samples in enumerate(rollouts):
        assert [sample.number for sample in samples] == list(range(len(samples)))
        assert all(0 <= number - sample.version <= bound for sample in samples), (name, number)
    frozen = ["--rollouts_from", f"{folder}/{name}/rollouts.jsonl", "--tis_cap", "2"]
    line = command_line(folder, f"{name}-replay", flags)
    at = line.index("--reward_func")
    del line[at : at + 2]
    at = line.index("--max_staleness")
    del line[at : at + 4]
    code, output = torchrun(RANKS, "-m", "trainer.cli.train_ppo", *line, *frozen, timeout=600)
    assert code == 0, output[-5000:]
    rows, replayed = read_steps(folder / name), read_steps(folder / f"{name}-replay")
    assert len(rows) == len(replayed) == STEPS
    for row, other in zip(rows, replayed):
        for key in sorted({*SAME.split(), "staleness"} - {"weights_checksum"}):
            assert row[key] == other[key], (name, row["step"], key, row[key], other[key])
    assert not list((folder / name).rglob("*.tmp"))


def make_plan(generator: random.Random, phase: str) -> dict:
    victim, most = generator.choice(["all", 0, 1]), 1 if phase == "save" else 3
    return {"phase": phase, "skip": generator.randint(0, most), "victim": victim, "delay": generator.uniform(0, 0.02)}


def kill_phases(folder: Path, flags: list[str], phases: list[str], count: int, seed: int, bound: int) -> None:
    generator, done, number = random.Random(seed), 0, 0
    prepare(folder)
    line = command_line(folder, "undisturbed", flags)
    code, output = torchrun(RANKS, "-m", "trainer.cli.train_ppo", *line, timeout=300)
    assert code == 0, output[-5000:]
    while done < count:
        number += 1
        name, coming = f"run-{number}", [phases[n % len(phases)] for n in range(done, count)]
        done += len(killed_run(folder, name, flags, [make_plan(generator, phase) for phase in coming]))
        if bound:
            assert_sound_ahead(folder, name, flags, bound)
        else:
            assert_same_run(folder, name, "undisturbed")
        resumed, same = sum(row.get("event") == "resume" for row in read_rows(folder / name)), "the undisturbed run"
        kept = (folder / f"{name}.log").read_text().count("were generated before the resume")
        told = f"{resumed} resumes, {kept} with rollouts from before, {done} of {count} kills"
        print(f"{name}: bitwise {'its replay' if bound else same}, {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--zero_stage")
    parser.add_argument("--async_save", action="store_true")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES)
    parser.add_argument("--max_staleness", type=int, default=0)
    args = parser.parse_args()
    bound, phases = args.max_staleness, args.phases or (AHEAD if args.max_staleness else LOCK_STEP)
    flags = ["--backend", args.backend, *(["--zero_stage", args.zero_stage] if args.zero_stage else [])]
    with tempfile.TemporaryDirectory() as folder:
        flags += ["--async_save"] * args.async_save + ["--max_staleness", str(bound), "--tis_cap", "2"] * bool(bound)
        kill_phases(Path(folder), flags, phases, args.count, args.seed, bound)


if __name__ == "__main__":
    main()

"""SIGKILL of environments' processes at random moments, while train_ppo --env_sandbox goes on with 2 ranks.

    python test/kill_environments.py [--count 5] [--seed 0]

The run must go on, every rollout must be whole, lost episodes must be counted, and no process may be left.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from launch import LAUNCHER, ROOT, _environment, read_steps

from trainer.datasets.demos.demo import make_demo
from trainer.rollout.rollouts_file import read_rollouts

TALKER = """
import time

class Environment:
    def reset(self, task):
        self.turn, self.metrics = 0, {}
        return task["messages"]

    def step(self, response):
        time.sleep(0.05)
        self.turn += 1
        reward = sum(character in "0123456789" for character in response) / 8
        return (reward, True) if self.turn == 3 else ([{"role": "user", "content": "go on"}], reward, False)
"""


def command_line(folder: Path, name: str, rollouts: int, more: list[str]) -> list[str]:
    flags = f"--backend fsdp2 --pretrain {folder}/demo/model --dataset {folder}/demo/prompts.jsonl --param_dtype fp32 --no_save "
    flags += "--max_samples 64 --advantage_estimator group_norm --prompt_max_len 64 --rollout_batch_size 8 "
    flags += "--n_samples_per_prompt 2 --train_batch_size 16 --num_episodes 99 --micro_train_batch_size 8 --learning_rate 1e-3 "
    flags += f"--lr_scheduler constant --max_steps {rollouts} --output_dir {folder / name}"
    return ["-m", "trainer.cli.train_ppo", *flags.split(), *more]


def run(folder: Path, name: str, rollouts: int, more: list[str], meanwhile: Callable[[], bool]) -> str:
    """Run train_ppo and return its output. `meanwhile()` is called again and again. If it returns True, SIGTERM ends the
    ranks after their step."""
    log = folder / f"{name}.log"
    with log.open("w") as out:
        command = [*LAUNCHER, "2", *command_line(folder, name, rollouts, more)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, env=_environment(), start_new_session=True
        )
    stopped = False
    while process.poll() is None:
        if not stopped and meanwhile():
            stopped = True
            for rank in children(process.pid):
                os.kill(rank, signal.SIGTERM)
        time.sleep(0.005)
    output = log.read_text()
    assert "stopped by SIGTERM after step" in output if stopped else process.returncode == 0, output[-5000:]
    return output


def begun(folder: Path, name: str) -> bool:
    """Whether the first rollout is done, so that a kill hits a run at work."""
    return (folder / name / "rollouts.jsonl").exists()


def named(text: str) -> list[int]:
    """The processes with a text in their command line, without this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def children(pid: int) -> list[int]:
    """Those that any thread of it has started."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for path in list(Path(f"/proc/{pid}/task").glob("*/children")):
            with contextlib.suppress(OSError):  # that thread has
                found += [int(number) for number in path.read_text().split()]
    return found


def kill_environments(folder: Path, count: int, generator: random.Random) -> None:
    (folder / "talker.py").write_text(TALKER)
    more = ["--env", f"{folder}/talker.py", "--env_sandbox", "--generate_max_len", "48", "--stop", *"aeiou135"]
    state = {"kills": 0, "next": 0.0}

    def meanwhile() -> bool:
        if state["kills"] == count or not begun(folder, "killed") or time.monotonic() < state["next"]:
            return state["kills"] == count
        ours = {pid for rank in named(str(folder / "killed")) for pid in family(rank)}
        nurseries = {pid for pid in named("trainer.rollout.envs.nursery") if pid in ours}
        processes = [pid for nursery in nurseries for pid in family(nursery) - {nursery}]
        if processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(generator.choice(processes), signal.SIGKILL)
                state["kills"] += 1
            state["next"] = time.monotonic() + generator.uniform(0, 1)
        return False

    run(folder, "killed", 9999, more, meanwhile)
    rollouts, steps = read_rollouts(f"{folder}/killed/rollouts.jsonl"), read_steps(folder / "killed")
    lost = sum(sample.metrics["lost"] for samples in rollouts for sample in samples)
    assert all(len(samples) == 16 for samples in rollouts) and len(steps) == len(rollouts)
    assert 0 < lost <= state["kills"], (lost, state["kills"])
    print(f"environments: {state['kills']} kills while {len(rollouts)} rollouts were trained, {lost:.0f} episodes lost")
    assert not named(str(folder / "killed")), "a process is left"


def family(pid: int) -> set[int]:
    found = {pid}
    for child in children(pid):
        found |= family(child)
    return found


def main(kill: Callable, description: str, more: Mapping[str, int] = MappingProxyType({})) -> None:
    """Call `kill(folder, count, generator, *more)` with a new demo in `folder`.

    The flags are --count, --seed and `more`, which has the defaults of whole numbers.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    for flag, default in more.items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, generator = Path(name), random.Random(args.seed)
        make_demo(str(folder / "demo"))
        kill(folder, args.count, generator, *(vars(args)[flag] for flag in more))


if __name__ == "__main__":
    main(kill_environments, __doc__)

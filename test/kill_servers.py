"""SIGKILL of reward servers at random moments, while train_ppo goes on with 2 ranks.

    python test/kill_servers.py [--count 5] [--seed 0]

Two servers share the work. One of them is killed, and started again a moment later. The run must go on, its samples must be
those of an undisturbed run, and no process of a server may be left.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from kill_environments import begun, main, named, run
from launch import ROOT, _environment, read_steps

from trainer.compare.runs.launch import free_port
from trainer.models.reward import make_initial_reward_model
from trainer.rollout.rollouts_file import read_rollouts


class Server:
    """A server that is started again after each kill."""

    def __init__(self, folder: Path, command: list[str]):
        self.port = free_port()
        self.url, self._log = f"http://127.0.0.1:{self.port}", folder / f"server-{self.port}.log"
        self.command = [sys.executable, "-m", *command, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        with self._log.open("a") as out:
            streams = {"stdout": out, "stderr": out, "env": _environment(), "start_new_session": True}
            self._process = subprocess.Popen(self.command, cwd=ROOT, **streams)

    def answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(self.url + "/health", timeout=5).read()
            return True
        return False

    def kill(self) -> None:
        """Only the process that was started: its own processes must end with it."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


def random_kills(
    folder: Path,
    count: int,
    generator: random.Random,
    servers: list[Server],
    longest_wait: float,
    kill: Callable[[Server], None],
) -> Callable[[], bool]:
    """A `meanwhile` of `run`: `kill` is called of one server up to `longest_wait` seconds after all answer, `count` times. Each
    is started again within 2 s. True once all answer after the last kill, and a wait."""
    state = {"kills": 0, "next": 0.0, "dead": None, "back": 0.0}

    def meanwhile() -> bool:
        now = time.monotonic()
        if state["dead"] and now >= state["back"]:
            state["dead"].start()
            state["dead"] = None
        if not begun(folder, "killed") or state["dead"] or now < state["next"]:
            return False
        if not state["next"]:
            if all(server.answers() for server in servers):
                state["next"] = now + generator.uniform(0, longest_wait)
            else:
                time.sleep(0.5)
            return False
        if state["kills"] == count:
            return True
        state.update(dead=generator.choice(servers), kills=state["kills"] + 1, next=0.0)
        kill(state["dead"])
        state["back"] = time.monotonic() + generator.uniform(0, 2)
        return False

    return meanwhile


def kill_servers(folder: Path, count: int, generator: random.Random) -> None:
    make_initial_reward_model(f"{folder}/demo/model", f"{folder}/scorer", 0, False)
    command = ["trainer.cli.serve_rm", "--reward_pretrain", f"{folder}/scorer", "--param_dtype", "fp32"]
    servers = [Server(folder, command) for _ in range(2)]
    while not all(server.answers() for server in servers):
        time.sleep(0.5)
    urls, more = ",".join(server.url for server in servers), ["--label_key", "label", "--generate_max_len", "24"]
    more += ["--remote_rm_url", urls, "--learning_rate", "1e-5"]
    meanwhile = random_kills(folder, count, generator, servers, 2, Server.kill)
    try:
        run(folder, "killed", 9999, more, meanwhile)
        rollouts, steps = read_rollouts(f"{folder}/killed/rollouts.jsonl"), read_steps(folder / "killed")
        assert len(steps) == len(rollouts) and all(len(samples) == 16 for samples in rollouts)
        run(folder, "undisturbed", len(rollouts), more, lambda: False)
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
    expected = read_rollouts(f"{folder}/undisturbed/rollouts.jsonl")
    for samples, others in zip(rollouts, expected, strict=True):
        assert [s.response_ids for s in samples] == [s.response_ids for s in others]
        # a server has other texts in its batches, so the last digits differ
        assert all(abs(s.score - o.score) <= 1e-4 * max(1, abs(o.score)) for s, o in zip(samples, others))
    deadline = time.monotonic() + 30
    while (left := named(f"{folder}/demo/model") + named(f"{folder}/scorer")) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, f"processes are left: {left}"
    print(f"reward servers: {count} kills while {len(rollouts)} rollouts were trained")


if __name__ == "__main__":
    main(kill_servers, __doc__)

"""--env_container: the same episodes in processes that a command starts. The commands here are small stand-ins for docker:
they show how processes begin, speak and end, and nothing of a container's own walls."""

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of
from launch import ROOT

from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs import container
from trainer.rollout.envs.container import words_of
from trainer.rollout.envs.env_process import ProcessEnvironment, check_sandbox
from trainer.rollout.envs.environments import Source
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.sandbox import Box

ENVIRONMENT = """
import os, subprocess, sys, time

class Environment:
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]

    def reset(self, task):
        self.turn, self.does, self.metrics = 0, task["does"], {}
        print("printed by the environment")
        assert not sys.stdin.read(), "requests are not for the code of the environment"
        return [{"role": "user", "content": f"How much is 2 + 3? {sorted(os.environ)}"}]

    def step(self, response):
        self.turn += 1
        self.metrics["pid"] = float(os.getpid())
        if self.turn == 1:
            return [{"role": "tool", "content": str(response.tool_calls[0]["arguments"]["a"] + 3)}], 0.25, False
        if self.does == "die":
            os._exit(1)
        if self.does == "hang":
            time.sleep(1000)
        return 1.0, True
"""
RUNNER = f"""#!/bin/sh
# as `docker run -i IMAGE`: the last arguments are the program
shift
export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}
exec "$@"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("container")
    (folder / "env.py").write_text(ENVIRONMENT)
    (folder / "run.sh").write_text(RUNNER)
    (folder / "run.sh").chmod(0o755)
    return folder


def play(folder, *does: str, timeout: float = 60.0):
    tokenizer, source = byte_tokenizer("qwen3"), Source(str(folder / "env.py"))
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TURNS["qwen3"]]
    command = words_of(f"'{folder}/run.sh' IMAGE")

    def make():
        return ProcessEnvironment(source, 1024, timeout, None, command)

    prompts = [{"row": 0, "label": None, "prompt_ids": [1], COLUMN + "does": name} for name in does]
    envs = replace(environments(make, tokenizer, timeout=timeout + 5), lockstep=True)
    return generate_episodes(envs, Script(turns), prompts, 1, sampling_of(tokenizer, "qwen3"), seed=0, rollout=0)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_an_episode_is_played_in_the_process_of_the_command(folder, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "a key")
    [sample] = play(folder, "well")
    assert sample.score == 1.25 and sample.finished and sample.metrics["lost"] == 0
    pid = int(sample.metrics["pid"])
    assert pid != os.getpid() and is_gone(pid)
    shown = byte_tokenizer("qwen3").decode(sample.prompt_ids)
    assert "PATH" in shown and "HF_TOKEN" not in shown
    assert "environment: printed by the environment" in capfd.readouterr().err


def test_a_container_that_is_lost_costs_its_episode_only(folder, monkeypatch):
    monkeypatch.setattr(container, "END_SECONDS", 2)
    died, hung, fine = play(folder, "die", "hang", "well", timeout=45.0)  # imports take long on a busy machine
    for sample in (died, hung):
        assert sample.metrics["lost"] == 1 and sample.score == 0.25 and len(sample.turns) == 2
    assert fine.score == 1.25 and is_gone(int(hung.metrics["pid"]))


def test_a_trainer_that_is_gone_ends_it(folder):
    """Nobody closes the connection of a trainer that is killed, but the kernel."""
    process = container.bear([str(folder / "run.sh"), "IMAGE"], Source(str(folder / "env.py")))
    process.connection.shutdown(socket.SHUT_RDWR)
    process.connection.close()
    assert process.process.wait(30) == 0


def test_one_that_ends_by_no_other_means_is_killed(folder, monkeypatch):
    monkeypatch.setattr(container, "END_SECONDS", 1)
    (folder / "deaf.sh").write_text("#!/bin/sh\ntrap '' TERM\nsleep 1000 & wait; sleep 1000\n")
    (folder / "deaf.sh").chmod(0o755)
    process = container.bear([str(folder / "deaf.sh")], Source("env.py"))
    time.sleep(0.3)
    process.end()
    assert process.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "command, said",
    [
        ("/nowhere/docker run", "/nowhere/docker starts no environment (FileNotFoundError"),
        ("false", "false starts no environment"),
        ("echo no frames", "echo starts no environment"),
    ],
)
def test_a_command_that_starts_nothing_is_one_line(command, said, folder):
    with pytest.raises(UserError, match=r"--env_container") as error:
        check_sandbox(Source(str(folder / "env.py")), Box(), words_of(command))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_environment_is_named_as_without_a_container(folder):
    with pytest.raises(UserError, match=r"none\.py"):
        check_sandbox(Source(str(folder / "none.py")), Box(), [str(folder / "run.sh"), "IMAGE"])
    check_sandbox(Source(str(folder / "env.py")), Box(), [str(folder / "run.sh"), "IMAGE"])


@pytest.mark.parametrize("command", ["", "  ", "docker 'run"])
def test_a_command_without_words_is_one_line(command):
    with pytest.raises(UserError, match="--env_container"):
        words_of(command)

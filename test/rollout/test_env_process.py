"""--env_sandbox: the same episodes in processes; one that dies, hangs or eats memory costs its own episode only."""

import os
import select
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of

from trainer import limits
from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs import episodes
from trainer.rollout.envs.env_process import ProcessEnvironment
from trainer.rollout.envs.environments import Response, Source, load_environment
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.nursery import Printed

ENVIRONMENT = """
import os, socket, subprocess, sys, time

class Environment:
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]

    def reset(self, task):
        self.turn, self.does, self.metrics = 0, task["does"], {}
        if self.does == "die once" and not os.path.exists(task_file + "-died"):
            os._exit(1)
        if self.does == "die at once":
            os._exit(1)
        return [{"role": "user", "content": f"How much is 2 + 3? {task['nested']}"}]

    async def step(self, response):
        self.turn += 1
        self.metrics["finished"] = float(response.finished)
        if self.turn == 1:
            return [{"role": "tool", "content": str(response.tool_calls[0]["arguments"]["a"] + 3)}], 0.25, False
        if self.does == "die":
            os._exit(1)
        if self.does == "hang":
            subprocess.Popen(["sleep", "1234"], start_new_session=True)
            time.sleep(60)
        if self.does == "eat":
            self.eaten = bytearray(1 << 40)
        if self.does == "call out":
            port = int(open(port_file).read())
            socket.create_connection(("127.0.0.1", port), timeout=5)
        if self.does == "raise":
            raise KeyError("no sum")
        return 1.0, True
"""
RIGHT = {"row": 0, "label": None, "prompt_ids": [1], COLUMN + "nested": [1, {"a": None}], COLUMN + "does": "well"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("env_process")
    files = f"task_file, port_file = {str(folder / 'pid')!r}, {str(folder / 'port')!r}\n"
    (folder / "env.py").write_text(files + ENVIRONMENT)
    return folder


def play(folder, *does: str, inside: bool = True, timeout: float = 20.0, made: list | None = None):
    """An episode for each of `does`, with the turns of a model that knows the task."""
    tokenizer, path = byte_tokenizer("qwen3"), str(folder / "env.py")
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TURNS["qwen3"]]

    def make():
        env = ProcessEnvironment(Source(path), 1024, timeout) if inside else load_environment(path)()
        if made is not None:
            made.append(env)
        return env

    prompts = [{**RIGHT, COLUMN + "does": name} for name in does]
    # the script has one text for each turn, so its episodes go together
    envs = replace(environments(make, tokenizer, timeout=timeout + 5), lockstep=True)
    sampling = sampling_of(tokenizer, "qwen3")
    return generate_episodes(envs, Script(turns), prompts, 1, sampling, seed=0, rollout=0)


def test_processes_change_nothing(folder):
    [here], [there] = play(folder, "well", inside=False), play(folder, "well")
    assert there.metrics.pop("lost") == 0 and there == here and here.score == 1.25 and here.finished


def test_a_process_that_is_lost_costs_its_episode_only(folder):
    started, made = time.monotonic(), []
    died, ate, hung, fine = play(folder, "die", "eat", "hang", "well", timeout=4.0, made=made)
    assert time.monotonic() - started < 30
    for sample in (died, ate, hung):
        assert sample.metrics["lost"] == 1 and sample.score == 0.25 and not sample.finished and len(sample.turns) == 2
    assert fine.metrics["lost"] == 0 and fine.score == 1.25 and fine.finished
    sleeping = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\0001234" in read(path)]
    assert not sleeping, "what it started is still there"


TASK = """
import asyncio

class Environment:
    async def reset(self, task):
        self.said, self.answers = asyncio.Queue(), asyncio.Queue()
        self.episode = asyncio.create_task(self.play())
        return [{"role": "user", "content": await self.answers.get()}]

    async def play(self):
        await self.answers.put("How much is 2 + 3?")
        await self.answers.put(float("5" in await self.said.get()))

    async def step(self, response):
        await self.said.put(str(response))
        return await self.answers.get(), True
"""


def test_a_task_of_an_environment_outlives_a_call(folder):
    """As a rollout of the package `verifiers` does."""
    (folder / "task.py").write_text(TASK)
    env = ProcessEnvironment(Source(str(folder / "task.py")), 1024, 20.0)
    assert env.reset({}) == [{"role": "user", "content": "How much is 2 + 3?"}]
    assert env.step(Response("5", "5", [], True)) == ([], 1.0, True)
    env.close()


def test_kill_between_two_turns(folder):
    """SIGKILL from outside, while the model writes."""
    env = ProcessEnvironment(Source(str(folder / "env.py")), 1024, 20.0)
    assert env.reset({"nested": [], "does": "well"})[0]["role"] == "user" and env.tools
    os.kill(env._process.pid, signal.SIGKILL)
    assert select.select([env._process.connection], [], [], 20)[0]  # the kernel ends the sandbox after its supervisor
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    step = env.step(Response("x", "x", [call], True))
    assert not step.messages and not step.done and env.metrics == {"lost": 1.0}
    env.close()


def test_a_process_that_is_lost_in_reset_is_started_again(folder, monkeypatch):
    begin = ProcessEnvironment._begin

    def noted(*arguments):
        answer = begin(*arguments)
        (folder / "pid-died").touch()  # a sandbox cannot write it
        return answer

    monkeypatch.setattr(ProcessEnvironment, "_begin", noted)
    [sample] = play(folder, "die once")
    assert sample.score == 1.25 and sample.metrics["lost"] == 0


def test_there_is_no_network(folder):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        (folder / "port").write_text(str(server.getsockname()[1]))
        assert play(folder, "call out", inside=False)[0].score == 1.25
        with pytest.raises(UserError, match=r"step raised OSError: \[Errno 101\] Network is unreachable"):
            play(folder, "call out")


def test_an_error_of_the_environment_ends_the_run_with_one_line(folder):
    made: list[ProcessEnvironment] = []
    with pytest.raises(UserError, match=r"--env x.py: step raised KeyError: 'no sum' \(line"):
        play(folder, "well", "raise", made=made)
    assert all(env._process is None for env in made)


def test_a_process_that_is_lost_in_each_reset_costs_its_sample_only(folder, monkeypatch):
    monkeypatch.setattr(episodes, "PAUSES", (0.01, 0.02))
    made: list[ProcessEnvironment] = []
    well, lost = play(folder, "well", "die at once", made=made)
    assert well.score == 1.25 and not well.failed and "--env x.py: reset lost its process" in lost.failed
    assert len(made) == 4 and all(env._process is None for env in made)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_no_line_of_an_environment_looks_like_one_of_the_trainer(capfd, monkeypatch):
    """Also not if it comes in parts, between which another environment prints, and with characters of a terminal."""
    monkeypatch.setitem(limits._raised, "printed_kb", 8)
    one, other = Printed(), Printed()
    for printed, data in (
        (one, b"x"),
        (other, b"whole\n"),
        (one, b"error: done\n\xc3"),
        (one, b"\xa9\xc2\x9b2J\xe2\x80\xaeab\r\n"),
    ):
        printed.take(data)
    one.take("\x1b[31m\u2028error: end".encode())
    one.take(b"", is_last=True)
    other.take(b"y" * (8192 + 9))
    other.take(b"\nmore\n")
    output = capfd.readouterr().err
    assert output.splitlines()[:4] == [
        "environment: whole",
        "environment: xerror: done",
        "environment: é\\x9b2J\\u202eab",
        "environment: \\x1b[31m\\u2028error: end",
    ]
    assert all(line.startswith("environment: ") for line in output.splitlines())
    assert 8192 - 100 < output.count("y") < 8192 and "more" not in output

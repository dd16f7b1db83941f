"""Environments of OpenEnv on their own server, through their own client. Run by scripts/check_openenv.sh."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import pytest

pytest.importorskip("openenv", reason="openenv-core is not installed: scripts/check_openenv.sh")

import uvicorn
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of
from fastmcp import FastMCP
from openenv.core import GenericEnvClient, MCPToolClient
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from websockets.sync.server import serve

from trainer import limits
from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.openenv_env import from_openenv

pytestmark = pytest.mark.usefixtures("world")

OPEN, SEEDS, HEADERS = [], [], []  # of the servers: sessions that are open, seeds of resets, headers of requests


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str
    left: int


class Session:
    """What both environments below have: a session is open from `__init__` to `close`."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self, *args):
        super().__init__(*args)
        OPEN.append(self)

    def close(self):
        OPEN.remove(self)


class Game(Session, Environment):
    """Guess a digit in four turns."""

    def reset(self, seed=None, episode_id=None, answer="0", **kwargs):
        SEEDS.append(seed)
        self.secret, self.left = int(answer), 4
        return Hint(hint="Guess a digit.", left=4, reward=0.25)

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        if action.text == "wait":
            time.sleep(1)
        guess = int(action.text)  # the server sends the error of a wrong one
        if guess == self.secret:
            return Hint(hint="Right.", left=self.left, reward=1.0, done=True)
        return Hint(hint="Higher." if guess < self.secret else "Lower.", left=self.left, reward=-0.125)


class Calculator(Session, MCPEnvironment):
    """A tool, whose calls have a reward."""

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def add(a: int, b: int) -> int:
            "add of two numbers"
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s)
        if isinstance(action, CallToolAction):
            observation.reward = 0.25
        return observation


@contextlib.contextmanager
def served(env, action, observation):
    """The address of a server of the package."""
    app, listening = create_app(env, action, observation, max_concurrent_envs=4), socket.create_server(("127.0.0.1", 0))

    async def watched(scope, receive, send):
        HEADERS.extend(scope.get("headers", []))
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(watched, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def game():
    with served(Game, Guess, Hint) as address:
        yield address


def guess(response) -> dict:
    return {"text": response.strip()}


def guessing(address: str):
    return from_openenv(lambda: GenericEnvClient(address, message_timeout_s=0.5), guess)


def play(make, name: str, texts: list[str], answers=("5",), max_turns: int = 4, each: int = 1):
    """Episodes of one row for each answer, in which the engine writes the texts. Returns the samples and their texts."""
    tokenizer = byte_tokenizer(name)
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = [{"question": "How much is 2 + 3?", "answer": answer} for answer in answers]
    prompts = [
        {"row": i, "label": None, "prompt_ids": [1], **{COLUMN + key: value for key, value in row.items()}}
        for i, row in enumerate(rows)
    ]
    envs = replace(environments(make, tokenizer, max_turns), lockstep=True)  # the script has one text for each turn
    sampling = sampling_of(tokenizer, name, 4000)
    samples = generate_episodes(envs, Script(turns), prompts, each, sampling, seed=0, rollout=0)
    for sample in samples:
        spans = [] if sample.failed else sample.turns
        assert [sample.response_ids[start:end] for start, end in spans] == turns[: len(spans)]
    return samples, [tokenizer.decode(sample.prompt_ids + sample.response_ids) for sample in samples]


def all_closed() -> bool:
    """A server learns soon that its client has left."""
    end = time.monotonic() + 5
    while OPEN and time.monotonic() < end:
        time.sleep(0.01)
    return not OPEN


def test_episodes_are_those_of_the_environment_played_by_hand(game, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    SEEDS.clear()
    guesses, answers = ["3", "7", "5", "6"], ("5", "7", "6", "1")
    samples, texts = play(guessing(game), "qwen3", [text + "<|im_end|>" for text in guesses], answers)
    for answer, sample, text in zip(answers, samples, texts, strict=True):
        by_hand = Game()
        seen = [by_hand.reset(answer=answer)]
        while not seen[-1].done and len(seen) <= 4:
            seen.append(by_hand.step(Guess(text=guesses[len(seen) - 1])))
        by_hand.close()
        assert sample.score == sum(observation.reward for observation in seen)
        assert len(sample.turns) == len(seen) - 1 and sample.finished == seen[-1].done
        assert "How much is 2 + 3?\n\nhint: Guess a digit.\nleft: 4<|im_end|>" in text
        shown = [f"hint: {observation.hint}\nleft: {observation.left}<|im_end|>" for observation in seen[1:-1]]
        assert all(text.count(part) == 1 for part in shown)
    assert all_closed() and b"secret" not in b"".join(value for pair in HEADERS for value in pair)


def test_samples_of_a_row_have_one_seed_and_functions_of_the_user(game):
    SEEDS.clear()
    texts = {"opening": lambda task, text: [{"role": "user", "content": text}], "show": lambda seen: seen["hint"]}
    make = from_openenv(lambda: GenericEnvClient(game).sync(), guess, **texts)
    _, texts = play(make, "qwen3", ["5<|im_end|>"], ("5", "5"), each=2)
    assert len(SEEDS) == 4 and len(set(SEEDS)) == 1 and 0 <= SEEDS[0] < 2**31
    assert all("user\nGuess a digit.<|im_end|>" in text and "2 + 3" not in text for text in texts)
    play(make, "qwen3", ["6<|im_end|>"], ("6",))
    assert SEEDS[-1] != SEEDS[0] and all_closed()


@pytest.mark.parametrize("text, cause", [("no", "invalid literal for int"), ("wait", "TimeoutError")])
def test_an_error_of_the_server_costs_the_episode(game, text, cause):
    [failed], _ = play(guessing(game), "qwen3", [text + "<|im_end|>"])
    assert cause in failed.failed and all_closed()


def test_an_episode_without_a_session_fails_alone(game):
    samples, _ = play(guessing(game), "qwen3", ["5<|im_end|>"], each=5)  # the server has four
    [failed] = [sample.failed for sample in samples if sample.failed]
    assert "CAPACITY_REACHED" in failed or "ConnectionClosed" in failed  # the server sends that, and leaves
    assert all_closed()


@pytest.mark.parametrize("name", TURNS)
def test_tools_of_an_environment(name):
    with served(Calculator, CallToolAction, CallToolObservation) as address:
        make = from_openenv(lambda: MCPToolClient(address), reward=lambda task, answer: float(task["answer"] in answer))
        [sample], [text] = play(make, name, TURNS[name])
        assert sample.score == 1.25 and sample.finished and sample.metrics == {"tool_calls": 1, "tool_errors": 0}
        assert "add of two numbers" in text and text.count("It is 5.") == 1
        if name == "qwen3":
            wrong = TURNS[name][0].replace('"b": 3', '"c": 3')
            [sample], [text] = play(make, name, [wrong, *TURNS[name]])
            assert sample.score == 1.5 and sample.metrics == {"tool_calls": 2, "tool_errors": 1}
            assert '"a": {"type": "integer"}' in text and text.count("error: ") == 1
        assert all_closed()


OPENED = json.dumps({"type": "observation", "data": {"observation": {"hint": "?"}, "reward": None, "done": False}})


@pytest.mark.parametrize(
    "answer, cause",
    [
        (None, "ConnectionClosed"),
        ("no json", "no JSON: JSONDecodeError"),
        ("x" * (1 << 20) + "x", "1009 (message too big)"),
        (OPENED.replace("null", "[" + "[]," * 200_000 + "0]"), "JSON of more than 200000 values"),
        (OPENED.replace("null", "NaN"), "reward nan"),
        (OPENED.replace("null", '"much"'), "could not convert"),
        (OPENED.replace("false", '"no"'), "done no"),
        ("[]", "a list instead of an object"),
    ],
)
def test_a_bad_answer_costs_the_episode(answer, cause, monkeypatch):
    """None: the server leaves."""
    monkeypatch.setitem(limits._raised, "answer_mb", 1)

    def session(connection):
        connection.recv()
        connection.send(OPENED)
        connection.recv()
        if answer is not None:
            connection.send(answer)
            connection.recv()

    with serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        [failed], _ = play(from_openenv(lambda: GenericEnvClient(address), guess), "qwen3", ["5<|im_end|>"])
        assert "ConnectionError" in failed.failed and cause in failed.failed
        server.shutdown()


def test_no_server_and_wrong_arguments():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    [failed], _ = play(from_openenv(lambda: GenericEnvClient(address), guess), "qwen3", [])
    assert "Failed to connect" in failed.failed
    with pytest.raises(UserError, match="an action and a reward"):
        from_openenv(lambda: GenericEnvClient(address), guess, lambda task, answer: 0.0)
    with pytest.raises(UserError, match="GenericEnvClient lists no tools"):
        from_openenv(lambda: GenericEnvClient(address))()


def test_a_server_that_lists_no_tools_costs_the_episode():
    class Gone:
        async def list_tools(self):
            raise RuntimeError("closed")

    with pytest.raises(ConnectionError, match=r"^OpenEnv: RuntimeError: closed$"):
        asyncio.run(from_openenv(Gone)().reset({"prompt": "go"}))

"""Environments of the package `verifiers` run unchanged, token for token. Run by scripts/check_verifiers.sh."""

import asyncio
import os
import sys

import pytest

pytest.importorskip("verifiers.v1")

import reasoning_gym
import verifiers.v1 as vf
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of

from trainer import limits
from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs import verifiers_env
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.verifiers_env import from_verifiers

# a package of an environment as its users write it: tasks, a tool in a server of its own, rewards
SUMS = '''
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        yield Sum(Data(prompt="How much is 2 + 3?", system_prompt="Use tools.", answer="5"), self.config.task)

class Both(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

__all__ = ["Sums"]
if __name__ == "__main__":
    Adder.run()
'''
# programs in this process, which do what the trainer refuses; and puzzles of reasoning_gym as tasks
PLAYS = """
import asyncio, json
import httpx
import reasoning_gym
import verifiers.v1 as vf

class Config(vf.HarnessConfig):
    play: str = "once"

class Program(vf.Harness[Config]):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER, EXECUTES_CODE, SUPPORTS_MCP = True, False, False, True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        play, messages = self.config.play, [{"role": "user", "content": data.prompt}]

        async def ask(messages, path="chat/completions", **options):
            async with httpx.AsyncClient(timeout=None) as client:
                body = {"model": ctx.model, "messages": messages, **options}
                head = {"Authorization": f"Bearer {secret}", "x-api-key": secret}
                return (await client.post(f"{endpoint}/{path}", json=body, headers=head)).json()

        if play == "messages":
            await ask(messages, "messages", max_tokens=9)
        if play == "parallel":
            await asyncio.gather(ask(messages), ask([*messages, *messages]))
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
        odd = {"floods": {"x": "x" * (2 << 20)}, "fills": {"x": [0] * 300_000}}
        answer = await ask(messages, temperature=0.3, **odd.get(play, {}))
        for _ in range(self.config.play not in ("once", "fails")):
            said, more = answer["choices"][0]["message"], {"role": "user", "content": "And again?"}
            if play == "rewrites":
                said = {**said, "content": "something else"}
            opening = [{**messages[0], "content": "short"}] if play == "shortens" else messages
            answer = await ask([*opening, said, more], **({"tools": tools} if play == "tools" else {}))
        return vf.ProgramResult(exit_code=int(play == "fails"), stdout="", stderr="it broke")

class Data(vf.TaskData):
    entry: str = ""

class Puzzle(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def solved(self, trace) -> float:
        entry = json.loads(self.data.entry)
        puzzles = reasoning_gym.create_dataset(entry["metadata"]["source_dataset"], size=5, seed=42)
        return puzzles.score_answer(answer=trace.last_reply, entry=entry)

class Puzzles(vf.Taskset[Puzzle, vf.TasksetConfig]):
    def load(self):
        for entry in reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=42):
            yield Puzzle(Data(prompt=entry["question"], entry=json.dumps(entry)), self.config.task)

__all__ = ["Puzzles", "Program"]
"""


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("packages")
    (folder / "sums.py").write_text(SUMS)
    (folder / "plays.py").write_text(PLAYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))  # of the tool's server
        yield


def environment(taskset: str, agent: dict, **config) -> vf.Env:
    agent = {"runtime": {"type": "subprocess"}, **agent}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, "agent": agent, **config}))


def row_of(env: vf.Env, number: int = 0) -> dict:
    return [task.data.model_dump(mode="json", exclude_defaults=True) for task in env.taskset][number]


def play(env, tokenizer, name: str, texts: list[str], row: dict, max_turns: int = 4, num: int = 1):
    """`num` episodes in which the engine writes the texts. Returns the last sample and the ids of the texts."""
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt = {"row": 0, "label": None, "prompt_ids": [1], **{COLUMN + key: value for key, value in row.items()}}
    envs, sampling = environments(from_verifiers(env), tokenizer, max_turns, 120), sampling_of(tokenizer, name, 4000)
    *_, sample = generate_episodes(envs, Script(turns), [prompt], num, sampling, seed=0, rollout=0)
    return sample, turns


@pytest.mark.parametrize("name", TURNS)
def test_a_tool_in_a_server_and_the_chat_program_of_the_package(name):
    env, tokenizer = environment("sums", {"harness": {"id": "null"}}), byte_tokenizer(name)
    sample, turns = play(env, tokenizer, name, TURNS[name], row_of(env))
    assert [sample.response_ids[start:end] for start, end in sample.turns] == turns
    assert sample.score == 2.0 and sample.finished and sample.metrics == {"right": 1, "turns": 2}
    text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    assert "Add two numbers." in text and "Use tools." in text and text.count("It is 5.") == 1


def test_limits_of_both_sides_and_a_call_that_is_no_json():
    """Theirs ends the episode with a score; ours cuts it, and then it has none."""
    tokenizer, call = byte_tokenizer("qwen3"), TURNS["qwen3"][0]
    env = environment("sums", {"harness": {"id": "null"}, "max_turns": 2})
    sample, _ = play(env, tokenizer, "qwen3", [call, call.replace('"b": 3', '"c": 3'), call], row_of(env))
    assert len(sample.turns) == 2 and sample.finished and sample.metrics == {"right": 0, "turns": 2}
    env = environment("sums", {"harness": {"id": "null"}})
    texts = [call.replace('"b": 3}', '"b": '), call.replace('"b": 3', '"c": 3'), call]
    sample, _ = play(env, tokenizer, "qwen3", texts, row_of(env), max_turns=3)
    assert len(sample.turns) == 3 and not sample.finished and sample.score == 0
    said = tokenizer.decode(sample.response_ids)
    assert "error: invalid JSON in tool arguments" in said and "Field required" in said


@pytest.mark.parametrize(
    "how, error",
    {
        "shortens": "step raised ValueError: the environment changes earlier messages",
        "rewrites": "step raised ValueError: the environment changes earlier messages",
        "tools": "step raised ValueError: the environment changes its tools",
        "parallel": "ValueError: the environment cannot be trained: it asks for two turns at once",
    }.items(),
)
def test_a_program_that_tokens_cannot_follow(how, error):
    env = environment("plays", {"harness": {"id": "plays", "play": how}})
    with pytest.raises(UserError, match=error):
        play(env, byte_tokenizer("qwen3"), "qwen3", ["One.<|im_end|>", "Two.<|im_end|>"], row_of(env))


@pytest.mark.parametrize("how, found", {"floods": "HarnessError", "fills": "more than 200000 values"}.items())
def test_a_request_that_is_too_large_costs_its_episode(how, found, monkeypatch):
    """The first is stopped by the package's server, before it is in memory. The second reaches the trainer."""
    monkeypatch.setitem(limits._raised, "answer_mb", 1)
    env = environment("plays", {"harness": {"id": "plays", "play": how}})
    sample, _ = play(env, byte_tokenizer("qwen3"), "qwen3", ["One.<|im_end|>"], row_of(env))
    assert "ConnectionError" in sample.failed and found in sample.failed, sample.failed


def test_puzzles_of_reasoning_gym(capfd):
    env, tokenizer = environment("plays", {"harness": {"id": "plays"}}), byte_tokenizer("qwen3")
    puzzles = reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=42)
    for number, entry in enumerate(puzzles):
        for text in (entry["answer"], "no"):
            sample, _ = play(env, tokenizer, "qwen3", [f"{text}<|im_end|>"], row_of(env, number), num=2)
            assert sample.score == puzzles.score_answer(answer=text, entry=entry) and sample.finished
    assert "requests set temperature; the trainer samples by its own flags" in capfd.readouterr().out


def test_agents_programs_and_versions_that_are_refused(monkeypatch):
    tokenizer, turns = byte_tokenizer("qwen3"), ["One.<|im_end|>"] * 2
    row = row_of(environment("plays", {}))

    async def unreachable(*address):
        raise OSError("Network is unreachable")

    def tried(how: str, **config) -> str:
        env = environment("plays", {"harness": {"id": "plays", "play": how}}, **config)
        return play(env, tokenizer, "qwen3", turns, row)[0].failed

    with pytest.raises(UserError, match="the model plays two agents, or one twice"):
        tried("once", id="best-of-n", n=2)
    assert "HarnessError: harness 'plays' exited 1: it broke" in tried("fails")  # this episode only
    assert "its harness asks for /v1/messages" in tried("messages")  # in `reset`, which is tried again
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    sides = {"id": "user-sim", "taskset": {"id": "plays"}, "assistant": seat, "user": seat}
    sample, _ = play(vf.load_environment(vf.resolve_env_config(sides)), tokenizer, "qwen3", turns, row)
    assert "its agent user is not trained, and asks the trainer" in sample.failed
    with monkeypatch.context() as sandbox:
        sandbox.setattr(asyncio, "open_connection", unreachable)
        assert "cannot reach the trainer (Network is unreachable), as with --env_sandbox" in tried("once")
    with pytest.raises(UserError, match=r"agent.max_output_tokens \(allowed: --generate_max_len"):
        from_verifiers(environment("plays", {"max_output_tokens": 9}))
    monkeypatch.setattr(verifiers_env, "version", lambda name: "0.5.1")
    with pytest.raises(UserError, match=r"verifiers 0.5.1 \(allowed: pip install 'verifiers==0.4.\*'"):
        from_verifiers(environment("plays", {}))

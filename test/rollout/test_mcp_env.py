"""Tools of a real MCP server process over stdin and stdout, token for token; see also scripts/check_mcp.sh."""

import os
import sys
import time

import pytest
import torch.distributed as dist
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of
from launch import ROOT

from trainer.datasets.samples.prompts import COLUMN
from trainer.errors import UserError
from trainer.rollout.envs.env_process import ProcessEnvironment
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.mcp_env import MCPServer, from_mcp

# scripts/check_mcp.sh names a server of the package `mcp`
COMMAND = os.environ.get("MCP_SERVER", f"{sys.executable} {ROOT}/test/mcp_server.py").split()
THEIRS = "MCP_SERVER" in os.environ
ENV_FILE = """
from trainer.rollout.envs.mcp_env import from_mcp
make_environment = from_mcp({command}, lambda task, answer: float(task["answer"] in answer))
"""


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def right(task: dict, answer: str) -> float:
    return float(task["answer"] in answer)


def play(make, name: str, texts: list[str], episodes: int = 1):
    """Episodes in which the engine writes the texts. Returns the samples, the ids of the texts, and the tokenizer."""
    tokenizer = byte_tokenizer(name)
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    row = {"question": "How much is 2 + 3?", "answer": "5"}
    prompt = {"row": 0, "label": None, "prompt_ids": [1], **{COLUMN + key: value for key, value in row.items()}}
    envs, sampling = environments(make, tokenizer), sampling_of(tokenizer, name, 4000)
    return generate_episodes(envs, Script(turns), [prompt], episodes, sampling, seed=0, rollout=0), turns, tokenizer


def is_going(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")  # ended, but nobody has asked how
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", TURNS)
def test_an_episode_with_a_tool(name):
    [sample], turns, tokenizer = play(from_mcp(COMMAND, right), name, TURNS[name])
    assert [sample.response_ids[start:end] for start, end in sample.turns] == turns
    assert sample.score == 1.0 and sample.finished and sample.metrics == {"tool_calls": 1, "tool_errors": 0}
    text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    assert ("add of two numbers" in text or "Add two numbers" in text) and text.count("It is 5.") == 1


def test_a_call_that_fails_is_told_to_the_model():
    wrong = TURNS["qwen3"][0].replace('"b": 3', '"c": 3')
    unknown = TURNS["qwen3"][0].replace('"add"', '"multiply"')
    [sample], _, tokenizer = play(from_mcp(COMMAND, right), "qwen3", [wrong, unknown, TURNS["qwen3"][1]])
    assert sample.score == 1.0 and sample.metrics == {"tool_calls": 2, "tool_errors": 2}
    text = tokenizer.decode(sample.response_ids)
    assert THEIRS or ("missing: 'b'" in text and "error: no tool multiply" in text)


@pytest.mark.skipif(THEIRS, reason="the answers of our server name its process")
def test_servers_of_episodes(tmp_path):
    """One for each, or one for all; in processes of --env_sandbox, too. None is left over."""

    def servers(make) -> set[str]:
        samples, _, tokenizer = play(make, "qwen3", TURNS["qwen3"], 2)
        return {tokenizer.decode(s.response_ids).split("5 by ")[1].split("\n")[0] for s in samples}

    own = servers(from_mcp(COMMAND, right))
    assert len(own) == 2 and len(servers(from_mcp(COMMAND, right, shared=True))) == 1
    (tmp_path / "env.py").write_text(ENV_FILE.format(command=COMMAND))
    boxed = servers(lambda: ProcessEnvironment(f"{tmp_path}/env.py", 2048, 20.0))
    assert len(boxed) == 2
    deadline = time.monotonic() + 10  # a process that is killed needs a moment to go
    while going := [pid for pid in own | boxed if is_going(pid)]:
        assert time.monotonic() < deadline, going
        time.sleep(0.05)


@pytest.mark.skipif(THEIRS, reason="needs tools of our server")
def test_a_server_that_is_lost_ends_the_run_with_one_line():
    for tool, found in (("die", "ended: out of luck"), ("hang", "gave no answer to tools/call in 1 s")):
        with pytest.raises(UserError, match=f"step raised RuntimeError: MCP server .*{found}"):
            play(from_mcp(COMMAND, right, timeout=1), "qwen3", [TURNS["qwen3"][0].replace('"add"', f'"{tool}"')])
    with pytest.raises(RuntimeError, match=r"gave no answer to initialize|ended"):
        MCPServer(["cat", "/dev/null"], 1)

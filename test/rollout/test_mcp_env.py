"""Tools of MCP servers of the package `mcp`, as processes, token for token; and servers that send what they must not."""

import contextlib
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conversations import TURNS, Script, byte_tokenizer, environments, sampling_of
from launch import ROOT

from trainer import limits
from trainer.datasets.samples.prompts import COLUMN
from trainer.rollout.envs.env_process import ProcessEnvironment
from trainer.rollout.envs.environments import Source
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.envs.mcp_env import MCPServer, from_mcp

pytestmark = pytest.mark.usefixtures("world")

COMMAND = [sys.executable, f"{ROOT}/test/mcp_server.py"]
SIMPLE = """
from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> str:
    "add of two numbers"
    return str(a + b)


server.run()
"""
ENV_FILE = """
from trainer.rollout.envs.mcp_env import from_mcp
make_environment = from_mcp({command}, lambda task, answer: float(task["answer"] in answer))
"""


def right(task: dict, answer: str) -> float:
    return float(task["answer"] in answer)


def play(make, name: str, texts: list[str], episodes: int = 1):
    """Episodes in which the engine writes the texts. Returns the samples, the ids of the texts, and the tokenizer."""
    tokenizer = byte_tokenizer(name)
    turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    row = {"question": "How much is 2 + 3?", "answer": "5"}
    prompt = {"row": 0, "label": None, "prompt_ids": [1], **{COLUMN + key: value for key, value in row.items()}}
    # the script has one text for each turn, so its episodes go together
    envs = replace(environments(make, tokenizer), lockstep=True)
    sampling = sampling_of(tokenizer, name, 4000)
    return generate_episodes(envs, Script(turns), [prompt], episodes, sampling, seed=0, rollout=0), turns, tokenizer


def is_going(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")  # ended, but nobody has asked how
    except FileNotFoundError:
        return False


def servers_left() -> list[str]:
    """Processes of the server anywhere, also in sandboxes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if COMMAND[1].encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize("name", TURNS)
def test_an_episode_with_a_tool(name):
    [sample], turns, tokenizer = play(from_mcp(COMMAND, right), name, TURNS[name])
    assert [sample.response_ids[start:end] for start, end in sample.turns] == turns
    assert sample.score == 1.0 and sample.finished and sample.metrics == {"tool_calls": 1, "tool_errors": 0}
    text = tokenizer.decode(sample.prompt_ids + sample.response_ids)
    assert "add of two numbers" in text and text.count("It is 5.") == 1


def test_a_server_of_decorated_functions():
    [sample], _, tokenizer = play(from_mcp([sys.executable, "-c", SIMPLE], right), "qwen3", TURNS["qwen3"])
    assert sample.score == 1.0 and sample.metrics == {"tool_calls": 1, "tool_errors": 0}
    assert "add of two numbers" in tokenizer.decode(sample.prompt_ids)


def test_a_call_that_fails_is_told_to_the_model():
    wrong = TURNS["qwen3"][0].replace('"b": 3', '"c": 3')
    unknown = TURNS["qwen3"][0].replace('"add"', '"multiply"')
    [sample], _, tokenizer = play(from_mcp(COMMAND, right), "qwen3", [wrong, unknown, TURNS["qwen3"][1]])
    assert sample.score == 1.0 and sample.metrics == {"tool_calls": 2, "tool_errors": 2}
    text = tokenizer.decode(sample.response_ids)
    assert "missing: 'b'" in text and "error: no tool multiply" in text


def test_servers_of_episodes(tmp_path):
    """One for each, or one for all; in processes of --env_sandbox, too. None is left over."""

    def servers(make) -> set[str]:
        samples, _, tokenizer = play(make, "qwen3", TURNS["qwen3"], 2)
        return {tokenizer.decode(s.response_ids).split("5 by ")[1].split("\n")[0] for s in samples}

    own = servers(from_mcp(COMMAND, right))
    assert len(own) == 2 and len(servers(from_mcp(COMMAND, right, shared=True))) == 1
    (tmp_path / "env.py").write_text(ENV_FILE.format(command=COMMAND))
    others = set(servers_left())
    boxed = servers(lambda: ProcessEnvironment(Source(f"{tmp_path}/env.py"), 2048, 20.0))
    assert len(boxed) == 2
    deadline = time.monotonic() + 10  # a process that is killed needs a moment to go
    while going := [name for name in own if is_going(name.split("-")[0])] or set(servers_left()) - others:
        assert time.monotonic() < deadline, going
        time.sleep(0.05)


# --- servers that send what they must not


ODD_SERVER = """
import json, sys
facts = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "odd", "version": "1"}}
tools = {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]}
for line in sys.stdin:
    message = json.loads(line)
    result = {"initialize": facts, "tools/list": tools}.get(message["method"])
    if message["method"] == "tools/call":
        %s
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def odd_command(statement: str) -> list[str]:
    return [sys.executable, "-c", ODD_SERVER % statement]


def test_a_server_that_is_lost_costs_its_sample_only():
    for statement, found in (
        ("sys.exit('out of luck')", "ended: out of luck"),
        ("import time; time.sleep(60)", "gave no answer to tools/call in 3 s"),
    ):
        [sample], *_ = play(from_mcp(odd_command(statement), right, timeout=3), "qwen3", TURNS["qwen3"])
        assert re.search(f"step raised ConnectionError: MCP server .*{found}", sample.failed), sample.failed
        assert "\n" not in sample.failed
    with pytest.raises(ConnectionError, match="ended"):
        MCPServer(["cat", "/dev/null"], 10)
    with pytest.raises(ConnectionError, match="gave no answer to initialize or tools/list in 1 s"):
        MCPServer(["sleep", "60"], 1)
    with pytest.raises(FileNotFoundError):
        MCPServer(["no_such_server"], 1)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("while True: sys.stdout.write('x' * 65536)", "sent a message of more than 2 MB; --limits"),
        ("print('[' + '[],' * 300_000 + '0]', flush=True)", "sent JSON of more than 200000 values; --limits values"),
        ("while True: print('x' * 65536, file=sys.stderr)", "gave no answer to tools/call in 3 s"),
        ("while True: print('x' * 65536)", "gave no answer to tools/call in 3 s"),
        ("while True: print(json.dumps({'jsonrpc': '2.0', 'method': 'x'}))", "gave no answer to tools/call in 3 s"),
        ("sys.stdout.close(); import os; os.close(1)", "ended"),
    ],
)
def test_a_server_that_sends_too_much_or_nothing(statement, expected, monkeypatch):
    monkeypatch.setitem(limits._raised, "answer_mb", 2)
    monkeypatch.setitem(limits._raised, "answer_s", 3)
    server = MCPServer(odd_command(statement))
    start = time.monotonic()
    with pytest.raises(ConnectionError, match=expected):
        server.call("add", {})
    server.close()
    assert time.monotonic() - start < 15


def test_an_answer_of_a_wrong_form_is_a_failed_tool():
    for result in ("{'content': 5}", "{}", "{'content': [{'type': 'text'}]}"):
        server = MCPServer(odd_command(f"result = {result}"), 30)
        text, failed = server.call("add", {})
        assert failed and text.startswith("error: ") and "\n" not in text, (result, text)
        server.close()


def test_a_list_of_tools_without_end_stops():
    endless = ODD_SERVER.replace("tools =", "tools = {'nextCursor': 'more'} |") % "pass"
    server = MCPServer([sys.executable, "-c", endless], 30)
    assert len(server.tools) == limits.limit("pages")
    server.close()


def test_the_environment_of_a_server(monkeypatch):
    """It has none of the variables of the trainer that may be secrets, but those that it is given."""
    monkeypatch.setenv("TOKEN", "secret")
    server = MCPServer(COMMAND, 30, {"GIVEN": "given"})
    text, _ = server.call("add", {"a": 2, "b": 3})
    assert text.endswith(" given") and "secret" not in text
    server.close()

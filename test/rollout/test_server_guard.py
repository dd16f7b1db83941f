"""What a stranger may ask of serve_engine, whose application of vLLM is here a small one; and who may start it open."""

import asyncio
import json
import sys

import pytest
from launch import run_process
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from trainer.cli import serve_engine
from trainer.errors import UserError
from trainer.rollout import peers
from trainer.rollout.engines.on_vllm import server_guard
from trainer.rollout.rewards.http_service import Door, HTTPLimits


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse((await request.body()).decode() or "ok")


@pytest.fixture
def client():
    methods = ["GET", "POST", "PUT", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", echo, methods=methods)])
    app.add_middleware(server_guard.Guard)
    with TestClient(app) as client:
        yield client
    server_guard.guard_with(server_guard.CLOSED)


KEY = {"Authorization": "Bearer secret"}
CLOSED = (
    "/sleep", "/wake_up", "/reset_prefix_cache", "/server_info", "/v1/completions", "/tokenize", "/docs",
    "/openapi.json", "/metrics", "/load", "/v1/load_lora_adapter", "/", "//collective_rpc", "/collective_rpc/",
)  # fmt: skip


def test_only_those_with_the_key_reach_what_a_trainer_uses(client):
    server_guard.guard_with("secret")
    assert client.get("/health").status_code == 200
    call = {"method": "facts_for_trainer"}
    for path in server_guard.PATHS:
        assert client.post(path, json=call, headers=KEY).json() == call
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert client.post(path, json=call, headers=headers).status_code == 401
        assert client.get(path, headers=KEY).status_code == 404
    for path in CLOSED:
        assert client.post(path, headers=KEY).status_code == 404, path
        assert client.get(path).status_code == 401, path


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps({"method": "receive_trainer_weights", "args": ["x"]}), 200),
        (json.dumps({"method": "execute_method"}), 403),
        (json.dumps({"method": ["facts_for_trainer"]}), 403),
        ("[]", 400),
        ("{", 400),
        ("[" * 50_000, 400),
        (json.dumps({"method": "facts_for_trainer", "x": "y" * 100_000}), 413),
    ],
)
def test_a_call_is_one_of_two_methods(client, body, status):
    server_guard.guard_with(None)
    answer = client.post("/collective_rpc", content=body)
    assert answer.status_code == status and (status != 200 or answer.text == body)


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_web_page_may_not_ask(client, key):
    """A page can send a POST of plain text to loopback. Browsers then send an Origin, also `null`."""
    server_guard.guard_with(key)
    for origin in ("https://a.example", "null", "http://127.0.0.1:8000"):
        headers = {**KEY, "Origin": origin, "Content-Type": "text/plain"}
        answer = client.post("/collective_rpc", content='{"method": "receive_trainer_weights"}', headers=headers)
        assert answer.status_code == 403 and "web page" in answer.text


@pytest.mark.parametrize("host", ["a.example:8001", "A.EXAMPLE.", "127.0.0.1.example", "[::1", "localhost.example"])
def test_a_domain_is_no_name_of_a_server_without_a_key(client, host):
    """A page can point its own domain to 127.0.0.1. Its requests are then of its own origin, and a GET has no Origin."""
    assert peers.is_of_web_page(None, host)
    door = Door(HTTPLimits(max_body=1, max_connections=1, read_timeout=1))
    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    answer = asyncio.run(door.guarded(echo)(Request(scope)))
    assert answer.status_code == 403 and b"web page" in answer.body and b"--api_key" in answer.body
    server_guard.guard_with(None)
    call = {"method": "facts_for_trainer"}
    assert client.post("/collective_rpc", json=call, headers={"Host": host}).status_code == 403
    assert "--api_key" in client.post("/collective_rpc", json=call, headers={"Host": host}).text
    server_guard.guard_with("secret")
    assert client.post("/collective_rpc", json=call, headers={"Host": host, **KEY}).status_code == 200
    for good in ("127.0.0.1:8001", "[::1]:8001", "[::1]", "localhost:8001", "gpu7", "a.localhost", "10.0.0.7:80", ""):
        assert not peers.is_of_web_page(None, good), good


def test_a_process_that_knows_no_key_answers_nobody(client):
    assert client.post("/collective_rpc", json={"method": "facts_for_trainer"}).status_code == 503


def test_what_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_engine.importlib.util, "find_spec", lambda name: name)
    for more, found in (
        (["--host", "0.0.0.0"], "--host 0.0.0.0 without --api_key"),
        (["--host", "::"], "--host :: without --api_key"),
        (["--api_key", "/nowhere"], "--api_key: /nowhere"),
        (["--port", "99999"], "--port: 99999"),
        (
            ["--speculative_tokens", "4", "--tensor_parallel_size", "2"],
            "--speculative_tokens 4 with --tensor_parallel_size 2",
        ),
    ):
        with pytest.raises(UserError, match=found.replace(".", r"\.")):
            serve_engine.run(["--pretrain", str(tmp_path), *more])


def test_the_flag_is_there():
    code, output = run_process([sys.executable, "-m", "trainer.cli.serve_engine", "--help"])
    assert code == 0 and "--api_key" in output

"""What servers of rewards may send: no redirect takes the key, the time is for a whole answer, the size is limited."""

import contextlib
import json
import resource
import socket
import threading
import time

import pytest

from trainer import limits
from trainer.errors import Failed, UserError
from trainer.rollout import peers
from trainer.rollout.engines.on_vllm import vllm_server
from trainer.rollout.peers import BadAnswer, post_json, read_frame, read_json, send_frame
from trainer.rollout.rewards.remote_rewards import remote_scorer


@contextlib.contextmanager
def answering(*parts: bytes, pause: float = 0.0, endless: bytes = b""):
    """A server that reads a request, and sends the parts with pauses. Gives its URL and the heads that came."""
    heads, over = [], threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            heads.append(connection.recv(65536))
            with contextlib.suppress(TimeoutError):  # the body may come apart from the head
                connection.settimeout(0.05)
                heads[-1] += connection.recv(65536)
            connection.settimeout(None)
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            while endless and not over.is_set():
                connection.sendall(endless)
                time.sleep(pause)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", heads
        over.set()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def answered(score) -> list:
    """The scores. Raises what stands in place of the first one."""
    [scores, _] = score(["p"], ["r"], [None], [True])
    for failed in scores:
        if isinstance(failed, Failed):
            raise failed
    return scores


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_key_to_another_host(status):
    good = OK + b"Content-Length: 16\r\n\r\n" + b'{"rewards": [1]}'
    with answering(good) as (other, taken):
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(moved) as (url, asked):
            with pytest.raises(UserError, match=r"redirects to http://127\.0\.0\.1.*not followed"):
                answered(remote_scorer(url, 5, 0, "secret"))
            assert b"Bearer secret" in asked[0] and taken == []


@pytest.mark.parametrize(
    "parts, endless",
    [
        ((OK + b"Content-Length: 100000\r\n\r\n",), b" "),  # a body that drips
        ((b"HTTP/1.1 200 OK\r\n",), b"X-A: b\r\n"),  # a head that drips
        ((OK + b"Transfer-Encoding: chunked\r\n\r\n",), b"1\r\n \r\n"),
        ((b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n",), b" "),  # the text of a refusal
        ((), b""),
    ],
)
def test_the_time_is_for_the_whole_answer(parts, endless):
    with answering(*parts, pause=0.2, endless=endless) as (url, _):
        started = time.monotonic()
        with pytest.raises(UserError, match="no usable answer after 1 try"):
            answered(remote_scorer(url, 0.8, 0))
        assert time.monotonic() - started < 3


def test_the_size_of_an_answer_is_limited(monkeypatch):
    monkeypatch.setitem(limits._raised, "answer_mb", 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        answering(OK + b"\r\n", endless=b" " * (1 << 20)) as (url, _),
        pytest.raises(UserError, match="more than 4 MB"),
    ):
        answered(remote_scorer(url, 20, 0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"\xff", b'{"rewards": [NaN]}', b'{"rewards": ["\\ud800"]}', b"1", b"null"]
)
def test_odd_answers_are_one_line(body):
    with (
        answering(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body) as (url, _),
        pytest.raises(UserError, match="no usable answer after 1 try") as error,
    ):
        answered(remote_scorer(url, 5, 0))
    assert "\n" not in str(error.value)


def test_json_of_millions_of_values_takes_no_memory():
    """Commas and brackets in texts are text. Escapes hide no value."""
    for small in (
        b'["' + b"[{," * 300_000 + b'"]',
        b'["' + b'\\"[,' * 300_000 + b'", "\\\\"]',
        b"[" + b"1," * 199_990 + b"1]",
    ):
        assert read_json(small) == json.loads(small)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for inner in (b"[],", b"{},", b'"",', b'"\\\\",', b"1,", b'"\\",[]",[],'):
        value = inner * ((8 << 20) // len(inner))
        started = time.process_time()
        with pytest.raises(BadAnswer, match="more than 200000 values"):
            read_json(b"[" + value + b"0]")
        assert time.process_time() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_refusal_is_told_without_control_characters():
    body = json.dumps({"error": "\x1b[2Jno\nkey" + "x" * 9999}).encode()
    with (
        answering(b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as (url, _),
        pytest.raises(UserError, match="HTTPError: 401") as error,
    ):
        answered(remote_scorer(url, 5, 0))
    assert str(error.value).isprintable() and len(str(error.value)) < 600


def test_frames_have_one_deadline_and_a_limit():
    ours, theirs = socket.socketpair()
    send_frame(theirs, b"{}")
    assert read_frame(ours) == b"{}"
    theirs.sendall(b"\0\0\0\x04ab")
    started = time.monotonic()
    with pytest.raises(BadAnswer, match="in time"):
        read_frame(ours, time.monotonic() + 0.2)
    assert time.monotonic() - started < 1
    with pytest.raises(BadAnswer, match="does not read"):
        send_frame(theirs, bytes(1 << 24), time.monotonic() + 0.2)
    ours.close()
    other, its_end = socket.socketpair()
    its_end.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(BadAnswer, match="4294967295 bytes"):
        read_frame(other, time.monotonic() + 5)
    its_end.close()
    with pytest.raises(EOFError):
        read_frame(other, time.monotonic() + 5)


def test_lone_surrogates_are_no_text():
    with pytest.raises(BadAnswer):
        read_json(b'{"a": "\\udfff"}')
    assert read_json('{"a": "\U0001f600"}'.encode()) == {"a": "\U0001f600"}


def choice(**changes) -> dict:
    own = {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1}, {"logprob": -2}]}, "finish_reason": "stop"}
    return {"choices": [own | changes]}


def test_answers_of_a_rollout_server_have_a_checked_form():
    assert vllm_server._completion(choice(), 5, 3).token_ids == [1, 2]
    wrong = [
        choice(token_ids=[1]), choice(token_ids=[1, "2"]), choice(token_ids=[1, -2]), choice(token_ids=[True, 2]),
        choice(logprobs=None), {}, [], 7, choice(token_ids=[1, 3]), choice(token_ids=[10**30, 1]),
        {"choices": []}, choice(token_ids=None), choice(logprobs={"content": [{}, {}]}),
    ]  # fmt: skip
    wrong += [
        choice(logprobs={"content": [{"logprob": number}, {"logprob": 0}]})
        for number in (float("nan"), 5e300, 0.01, 10**400, -(10**400), -1e300, float("-inf"), "-1", True, None)
    ]
    for answer in wrong:
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            vllm_server._completion(answer, 5, 3)
    rounded = choice(logprobs={"content": [{"logprob": 1e-7}, {"logprob": -9999.0}]})
    assert vllm_server._completion(rounded, 5, 3).log_probs == [1e-7, -9999.0]
    likely = [{"logprob": -1, "top_logprobs": [{"token_id": t, "logprob": -1}]} for t in (1, 2)]
    assert vllm_server._completion(choice(logprobs={"content": likely}), 5, 3, 1).kept_ids == [[1], [2]]
    likely[0]["top_logprobs"].append({"token_id": 3, "logprob": -1})
    with pytest.raises(ValueError, match="likely tokens"):
        vllm_server._completion(choice(logprobs={"content": likely}), 5, 3, 1)
    with pytest.raises(ValueError, match="at most 1 asked"):
        vllm_server._completion(choice(), 1, 3)


def test_post_json_gives_the_answer():
    with answering(OK + b"Content-Length: 8\r\n\r\n" + b'{"a": 1}') as (url, heads):
        assert post_json(url, {"b": 2}, 5) == {"a": 1}
    assert b"Authorization" not in heads[0] and heads[0].endswith(b'{"b": 2}')


def test_the_limit_of_one_read_may_pass_before_the_timer(monkeypatch):
    monkeypatch.setattr(peers._Watched, "_expire", lambda watched: None)
    with answering(b"", pause=0.5) as (url, _), pytest.raises(TimeoutError, match=r"no whole answer within 0\.1 s"):
        post_json(url, {}, 0.1)

"""What clients of serve_train make counts and is freed: the HTTP service, with a thread that answers jobs as the ranks do."""

import json
import threading
import types
from queue import SimpleQueue

import numpy as np
import pytest
from api_client import Client
from starlette.testclient import TestClient

from trainer import limits
from trainer.errors import UserError
from trainer.rollout.rewards.http_service import HTTPLimits
from trainer.runs.api import api_sessions
from trainer.runs.api.api_messages import CLASSES, DTYPES
from trainer.runs.api.api_service import Offer, TrainingService
from trainer.runs.api.api_sessions import Job


class Here(Client):
    """The client of recorded requests, in this process."""

    def __init__(self, web: TestClient):
        self.web = web
        super().__init__("")

    def post(self, path: str, body: bytes, **headers: str) -> bytes:
        answer = self.web.post(f"/api/v1/{path}", content=body)
        if answer.status_code >= 400:
            raise ValueError(f"{answer.status_code} {answer.json()['error']}")
        return answer.content


def ranks(jobs: SimpleQueue, alive: set[str], paused: threading.Event) -> None:
    """Make and forget names as `ClientModels` does. A model of rank 9 and a sampler of saved weights cannot be made."""
    while (job := jobs.get()).method != "end":
        own = job.arguments
        paused.wait()
        if job.method == "forget":
            alive.difference_update(own["model_ids"], own["samplers"])
        if name := {"create": own.get("model_id"), "keep_sampler": own.get("sampler")}.get(job.method):
            alive.add(name)
        if job.method == "forward_backward":
            job.answer(({}, {}))
            continue
        failed = own.get("rank") == 9 or own.get("folder")
        job.answer(UserError("rank", "9") if failed else own.get("answer", {"pad": "x" * 1000}))


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setitem(limits._raised, "unread", 20)
    monkeypatch.setitem(limits._raised, "read_kb", 10 * (api_sessions.BYTES_OF_ANSWER + 1100) >> 10)
    jobs, alive, paused = SimpleQueue(), set(), threading.Event()
    paused.set()
    offer = Offer("base", 64, 2, (2,), 100, "nowhere", 0, True)
    service = TrainingService(jobs, offer, HTTPLimits(max_body=2 << 20, max_connections=9, read_timeout=9.0))
    thread = threading.Thread(target=ranks, args=(jobs, alive, paused))
    thread.start()
    with TestClient(service.app()) as web:
        yield types.SimpleNamespace(web=web, sessions=service._sessions, alive=alive, paused=paused)
        paused.set()  # a test that fails leaves no rank that waits
    jobs.put(Job("end", {}))
    thread.join()


def flush(served) -> None:
    """Wait until all jobs have ended."""
    ended = threading.Event()
    served.sessions.put(Job("last", {}, lambda result: ended.set()))
    assert ended.wait(10)


def test_everything_that_a_client_makes_counts_and_is_freed(served):
    one = Here(served.web)

    def make(number: int, rank: int) -> dict:
        own = {"session_id": one.session, "model_seq_id": number, "base_model": "base", "lora_config": {"rank": rank}}
        return one.ask("create_model", **own)

    for number in range(5):  # more than --max_clients; each is sent twice and answered once
        assert make(number, 9) == make(number, 9)
        assert one.result(make(number, 9))["error"] == "rank: 9"
    models = [one.result(make(number, 4)) and f"{one.session}:train:{number}" for number in (5, 6)]
    with pytest.raises(ValueError, match=r"422 2 models are here already \(--max_clients\)"):
        make(7, 4)

    for number in range(30):
        own = one.next(models[0]) | {"sampling_session_seq_id": number}
        one.result(one.ask("save_weights_for_sampler", **own))
        asked = {"session_id": one.session, "sampling_session_seq_id": number, "base_model": "base"}
        one.ask("create_sampling_session", **asked, **({"model_path": f"tinker://{models[0]}/weights/none"} if number % 2 else {}))  # fmt: skip
    one.result(one.step(models[0], 1.0))
    flush(served)
    [session] = served.sessions._open.values()
    assert served.alive == {*models, *session.samplers} and 14 < len(session.samplers) <= 16

    futures = [one.step(models[1], 1.0) for _ in range(19)]  # in flight together
    served.paused.clear()
    waiting = one.step(models[1], 1.0)
    with pytest.raises(ValueError, match="429 20 unread answers of this session"):
        one.step(models[1], 1.0)
    served.paused.set()
    for future in [*futures, waiting]:
        assert one.result(future)["pad"] and one.result(future)["pad"]
    with pytest.raises(ValueError, match="404"):
        one.result(futures[0])
    assert 8 <= len(session.futures) <= 12 and session.unread == 0
    assert served.sessions._owners.keys() == {*session.models, *session.samplers, *session.futures}

    others = [Here(served.web) for _ in range(2 * api_sessions.SESSIONS - 1)]
    with pytest.raises(ValueError, match=r"422 8 sessions are open already \(4 for each of --max_clients\)"):
        Here(served.web)
    for other in [one, *others]:
        for _ in range(2):  # the SDK may ask again
            assert json.loads(other.post(f"sessions/{other.session}/finish", b'{"reason": {"type": "success"}}')) == {}
    with pytest.raises(ValueError, match=r"410 session .* has ended"):
        one.ask("session_heartbeat", session_id=one.session)
    last = Here(served.web)
    own = {"session_id": last.session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    last.result(last.ask("create_model", **own))
    last.post(f"sessions/{last.session}/finish", b"{}")
    flush(served)
    assert not served.alive and not served.sessions._open and not served.sessions._owners


def batch_of(rows: int, tokens: list[int], model: str = "m", **inputs: tuple[int, list]) -> bytes:
    message = CLASSES["ForwardBackwardRequest"](model_id=model, loss_fn="cross_entropy")
    for _ in range(rows):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        for name, (dtype, values) in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = np.array(values, DTYPES[dtype]).tobytes(), dtype
    return message.SerializeToString()


def test_a_request_that_no_rank_could_work_on_is_refused_at_the_door(served):
    """Each of these ended the server, or took its memory: the ranks end with what a job raises besides UserError."""
    one, good = Here(served.web), {"target_tokens": (2, [4, 5]), "weights": (1, [1, 1])}
    sampler = f"{one.session}:sample:1"
    one.ask("create_sampling_session", session_id=one.session, sampling_session_seq_id=1, base_model="base")
    bodies = {
        "the name of the tokens": batch_of(1, [3, 4], **good, input_ids=(1, [3.0, 4.0])),
        "outside of the vocabulary": batch_of(1, [3, 4], **good | {"target_tokens": (1, [4, float("nan")])}),
        "2 values for 3 tokens": batch_of(1, [1, 2, 3], **good),
        "65 tokens": batch_of(1, [1] * 65, **good),
        "too many rows": b"\x1a\x00" * 20_000,
        "too many rows or parts": b"\x1a\x80\x9f\x49" + b"\x0a\x00" * 600_000,
        "no protobuf": b"\x1a" + b"\xff" * 11,
        "no protobuf message": b"\x07",
    }
    for said, body in bodies.items():
        with pytest.raises(ValueError, match=f"422 .*{said}"):
            one.post("forward_backward", body)
    with pytest.raises(ValueError, match="404 m: not known"):  # so far it is right
        one.post("forward_backward", batch_of(2, [3, 4], **good))
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    for name, values in {
        "stop": ["\ud800", [""], ["a"] * 65, "a" * 1001],
        "temperature": [1e-40, -1, True, "1"],
        "max_tokens": [0, 63, 1e300, 2.5, True],
    }.items():
        for value in values:
            own = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {name: value}}
            with pytest.raises(ValueError, match=f"422 {name}"):
                one.ask("asample", **own)
    for rank in (-1, 1.5, "4", None):
        with pytest.raises(ValueError, match=r"422 lora_config\.rank"):
            own = {"session_id": one.session, "model_seq_id": 1, "base_model": "base"}
            one.ask("create_model", **own, lora_config={"rank": rank})
    flush(served)


def test_requests_that_wait_have_a_limit_of_bytes(served, monkeypatch):
    monkeypatch.setitem(limits._raised, "unread_kb", 1)
    one, row = Here(served.web), {"target_tokens": (2, [4] * 60), "weights": (1, [1] * 60)}
    model = f"{one.session}:train:1"
    own = {"session_id": one.session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}}
    one.result(one.ask("create_model", **own))
    served.paused.clear()
    one.post("forward_backward", batch_of(1, [3] * 60, model, **row))
    with pytest.raises(ValueError, match=r"429 1 unread answer of this session with 10.. bytes"):
        one.step(model, 1.0)
    served.paused.set()
    flush(served)


@pytest.mark.parametrize("path", ["create_session", "asample", "retrieve_future"])
@pytest.mark.parametrize("inner", ["[],", '"",', "{},", "1,"])
def test_a_body_of_millions_of_values_is_refused_before_objects_are_made(served, path, inner, monkeypatch):
    monkeypatch.setitem(limits._raised, "request_values", 100_000)
    client, made = Here(served.web), []
    monkeypatch.setattr(json, "loads", lambda body, real=json.loads: made.append(len(body)) or real(body))
    bomb = b'{"request_id": [' + inner.encode() * 100_001 + b"0]}"
    with pytest.raises(ValueError, match="413 JSON of more than 100000 values; --limits request_values=N raises"):
        client.post(path, bomb)
    assert max(made) < 1000

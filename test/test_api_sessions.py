"""What clients of serve_train make counts and is freed: the HTTP service, with a thread that answers jobs as the ranks do."""

import json
import threading
import types
from queue import SimpleQueue

import pytest
from api_client import Client
from starlette.testclient import TestClient

from trainer.errors import UserError
from trainer.rollout.rewards.http_service import HTTPLimits
from trainer.runs.api import api_sessions
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
        failed = own.get("rank") == 9 or own.get("folder")
        job.answer(UserError("rank", "9") if failed else own.get("answer", {"pad": "x" * 1000}))


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(api_sessions, "MOST_WAITING", 20)
    monkeypatch.setattr(api_sessions, "READ_BYTES", 10 * (api_sessions.BYTES_OF_ANSWER + 1100))
    jobs, alive, paused = SimpleQueue(), set(), threading.Event()
    paused.set()
    offer = Offer("base", 64, 2, (2,), 100, "nowhere", 0, True)
    service = TrainingService(jobs, offer, HTTPLimits(max_body=1 << 20, max_connections=9, read_timeout=9.0))
    thread = threading.Thread(target=ranks, args=(jobs, alive, paused))
    thread.start()
    with TestClient(service.app()) as web:
        yield types.SimpleNamespace(web=web, sessions=service._sessions, alive=alive, paused=paused)
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
    with pytest.raises(ValueError, match="429 20 answers of this session"):
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

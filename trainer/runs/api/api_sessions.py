"""The sessions of clients: what each one has made, how much that may be, and when it is freed."""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from trainer.errors import UserError
from trainer.limits import limit
from trainer.metrics import counted
from trainer.rollout.rewards.http_service import Refused

PROTOBUF = "application/x-protobuf"
SESSION_SECONDS = 600  # the SDK sends a heartbeat every 10 s; without one for so long, a session has ended
SESSIONS = 4  # for each of --max_clients: a program opens one to train, and others to ask or to sample
SAMPLERS_KEPT = 8  # of one model, or of a session without a model
BYTES_OF_ANSWER = 1024  # of memory, besides the content


@dataclass
class Job:
    """A method of `ClientModels`, its arguments, and the function that gets its result or a UserError.

    `num_bytes` is about the size of the arguments.
    """

    method: str
    arguments: dict
    answer: Callable[[Any], None] = lambda result: None
    num_bytes: int = 0


@dataclass
class Session:
    seen: float
    models: dict[str, dict] = field(default_factory=dict)  # model id: answer of get_info
    samplers: list[str] = field(default_factory=list)
    futures: dict[str, asyncio.Future] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)  # futures whose answer the client has, with bytes, oldest first
    unread: int = 0  # bytes of the other answers, and of requests that wait


class Sessions:
    """The open sessions, and the owner of each model, sampler and future. `put` gives a job to the ranks."""

    def __init__(self, jobs: SimpleQueue, max_clients: int):
        self.put, self._most, self._open = jobs.put, max_clients, {}
        self._owners: dict[str, Session] = {}

    def open(self) -> str:
        """The name of a new session. Raises Refused if there are too many."""
        if len(self._open) >= SESSIONS * self._most:
            raise Refused(
                422,
                f"{counted(len(self._open), 'session is', 'sessions are')} open already ({SESSIONS} for each of --max_clients)",
            )
        name = f"session-{secrets.token_hex(8)}"
        self._open[name] = Session(time.monotonic())
        return name

    def session(self, name: str) -> Session:
        """An open session, which is alive now. Raises Refused."""
        if name not in self._open:
            raise Refused(410, f"session {name} has ended")
        self._open[name].seen = time.monotonic()
        return self._open[name]

    def owner(self, name: str) -> Session:
        """The session of a model, sampler or future. Raises Refused."""
        if name not in self._owners:
            raise Refused(404, f"{name}: not known here; its session may have ended")
        self._owners[name].seen = time.monotonic()
        return self._owners[name]

    def end(self, name: str) -> None:
        """Free all that a session has. Nothing happens if it has ended."""
        if session := self._open.pop(name, None):
            for key in (*session.models, *session.samplers, *session.futures):
                self._owners.pop(key, None)
            self.put(Job("forget", {"model_ids": list(session.models), "samplers": session.samplers}))

    async def end_idle(self) -> None:
        """End sessions without a heartbeat, for ever."""
        while True:
            await asyncio.sleep(SESSION_SECONDS / 20)
            for name, session in list(self._open.items()):
                if time.monotonic() - session.seen > SESSION_SECONDS:
                    self.end(name)

    def add_model(self, session: Session, model_id: str, facts: dict) -> None:
        """Note a model until its session ends, or it cannot be made. Raises Refused if there are too many."""
        if sum(len(one.models) for one in self._open.values()) >= self._most:
            raise Refused(422, f"{counted(self._most, 'model is', 'models are')} here already (--max_clients)")
        session.models[model_id], self._owners[model_id] = facts, session

    def add_sampler(self, session: Session, sampler: str) -> None:
        """Note a sampler, and drop the oldest ones of its session beyond SAMPLERS_KEPT for each model."""
        self._owners[sampler] = session
        session.samplers.append(sampler)
        while len(session.samplers) > SAMPLERS_KEPT * max(1, len(session.models)):
            self.drop(session, session.samplers[0])

    def drop(self, session: Session, name: str) -> None:
        """Free a model or a sampler."""
        if session.models.pop(name, None) or name in session.samplers:
            session.samplers = [one for one in session.samplers if one != name]
            self._owners.pop(name, None)
            self.put(Job("forget", {"model_ids": [name], "samplers": [name]}))

    def submit(self, session: Session, key: str, job: Job, encode: Callable[[Any], bytes] | None = None, makes="") -> dict:  # fmt: skip
        """Give a job to the ranks, unless a request with this key did it before. Returns the future's id.

        `makes` names the model or sampler that is freed if the job fails. Raises Refused if too many answers were not read.
        """
        if key not in session.futures:
            waiting = len(session.futures) - len(session.read)
            if waiting >= limit("unread") or session.unread >= limit("unread_kb") << 10:
                self.drop(session, makes)
                raise Refused(
                    429,
                    f"{counted(waiting, 'unread answer')} of this session with {counted(session.unread, 'byte')}",
                )
            loop = asyncio.get_running_loop()
            future = session.futures[key] = loop.create_future()
            self._owners[key] = session
            session.unread += job.num_bytes

            def done(content: bytes, kind: str, failed: bool) -> None:
                future.set_result((content, kind))
                session.unread += len(content) * (key not in session.read) - job.num_bytes
                if failed:
                    self.drop(session, makes)

            def answered(result: Any) -> None:
                kind, failed = "application/json", isinstance(result, UserError)
                if failed:
                    content = json.dumps({"error": str(result), "category": "user"}).encode()
                elif encode:
                    content, kind = encode(result), PROTOBUF
                else:
                    content = json.dumps(result).encode()
                loop.call_soon_threadsafe(done, content, kind, failed)

            self.put(Job(job.method, job.arguments, answered))
        return {"request_id": key}

    async def answer(self, key: str, seconds: float) -> tuple[bytes, str] | None:
        """(content, its type) of a future, or None after `seconds`. Raises Refused for an unknown one."""
        session = self.owner(key)
        if (future := session.futures.get(key)) is None:
            raise Refused(404, f"{key}: no request")
        if not (await asyncio.wait([future], timeout=seconds))[0]:
            return None
        content, kind = future.result()
        self.was_read(session, key, len(content))
        return content, kind

    def was_read(self, session: Session, key: str, num_bytes: int = 0) -> None:
        """The client has this answer, or will not ask for it. The oldest such answers beyond read_kb are freed."""
        session.unread -= num_bytes * (key not in session.read)
        session.read[key] = num_bytes + BYTES_OF_ANSWER
        while sum(session.read.values()) > limit("read_kb") << 10 and len(session.read) > 1:
            oldest = next(iter(session.read))
            del session.read[oldest], session.futures[oldest]
            self._owners.pop(oldest, None)

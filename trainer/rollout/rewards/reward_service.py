"""The HTTP service of `serve_rm`: concurrent requests share forward passes, and no client can block or fill the server.

Starlette reads and answers requests in one thread. A second thread scores. While it scores, the next batch gathers.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Optional

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trainer.limits import limit
from trainer.metrics import counted
from trainer.rollout.peers import BadAnswer, check_values
from trainer.rollout.rewards.http_service import (
    CLOSE,
    GONE,
    Door,
    HTTPLimits,
    Refused,
    address,
    as_json,
    gone,
    run_until_signal,
    server_of,
)

# score(prompts, responses, finished) -> one number per response; or a pair of these and, per response, if its text was cut
Scores = list[float] | tuple[list[float], list[bool]]
Score = Callable[[list[str], list[str], list[bool]], Scores]
SECONDS_BETWEEN_LINES = 60.0  # about cut texts


@dataclass(frozen=True, kw_only=True)
class Limits(HTTPLimits):
    batch_size: int
    max_queue: int  # texts
    max_text: int = 4 << 20  # bytes of one text


@dataclass
class Job:
    """The texts of one request."""

    prompts: list[str]
    responses: list[str]
    finished: list[bool]
    done: asyncio.Future
    scores: list[float] = field(default_factory=list)
    cuts: list[bool | None] = field(default_factory=list)  # None: the scorer does not tell
    taken: int = 0  # texts that are scored, or being scored


class Batcher:
    """Scores texts of waiting jobs in common batches. Jobs share a batch equally, so none waits for a large one."""

    def __init__(self, score: Score, limits: Limits):
        self._score, self._limits = score, limits
        self._jobs: deque[Job] = deque()
        self._arrived, self._thread = asyncio.Event(), ThreadPoolExecutor(1)
        self.queued, self.batches, self.texts, self.seconds = 0, 0, 0, 0.0
        self.cut, self._told, self._quiet_until = 0, 0, 0.0

    async def scores(self, prompts: list[str], responses: list[str], finished: list[bool]) -> dict[str, list]:
        """The answer: rewards, and truncated if the scorer tells. Raises Refused if the queue is full. A request larger than the queue is taken while nothing waits."""
        if not responses:
            return {"rewards": []}
        if self.queued and self.queued + len(responses) > self._limits.max_queue:
            raise Refused(
                503, f"{counted(self.queued, 'text waits', 'texts wait')}; --max_queue is {self._limits.max_queue}"
            )
        job = Job(prompts, responses, finished, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self.queued += len(responses)
        self._arrived.set()
        try:
            return await job.done
        finally:  # also if the client is gone: its texts are then not scored
            self.queued -= len(responses) - job.taken
            job.taken = len(responses)

    def _take(self) -> list[tuple[Job, range]]:
        """The next batch: (job, numbers of its texts), in turns. A job may be there several times."""
        parts, room = [], self._limits.batch_size
        while room and self._jobs:
            job = self._jobs.popleft()
            count = min(len(job.responses) - job.taken, room, max(1, self._limits.batch_size // (len(self._jobs) + 1)))
            if count <= 0:  # its client is gone
                continue
            parts.append((job, range(job.taken, job.taken + count)))
            room -= count
            job.taken += count
            self.queued -= count
            if job.taken < len(job.responses):
                self._jobs.append(job)
        return parts

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            parts = self._take()
            if not parts:
                self._arrived.clear()
                continue
            texts: tuple[list, list, list] = ([], [], [])
            for job, numbers in parts:
                for gathered, own in zip(texts, (job.prompts, job.responses, job.finished)):
                    gathered += own[numbers.start : numbers.stop]
            await self._score_parts(parts, texts)

    async def _score_parts(self, parts: list[tuple[Job, range]], texts: tuple[list, list, list]) -> None:
        """Score a batch. If it fails, each part is scored alone, so that a text fails its own request only."""
        scores, problem = await self._scores(texts)
        if problem and len(parts) > 1:
            start = 0
            for job, numbers in parts:
                own = tuple(column[start : start + len(numbers)] for column in texts)
                start += len(numbers)
                await self._score_parts([(job, numbers)], own)
            return
        for job, numbers in parts:
            if problem:
                if not job.done.done():
                    job.done.set_exception(problem)
                continue
            for score, is_cut in itertools.islice(scores, len(numbers)):
                job.scores.append(score)
                job.cuts.append(is_cut)
            if len(job.scores) == len(job.responses) and not job.done.done():
                tells = None not in job.cuts
                job.done.set_result({"rewards": job.scores} | ({"truncated": job.cuts} if tells else {}))

    def _tell_cuts(self) -> None:
        """One line about cut texts, at most one a minute."""
        if self.cut > self._told and time.monotonic() >= self._quiet_until:
            what = counted(self.cut, "text was", "texts were")
            print(f"warning: {what} longer than --max_len and lost the beginning, of {self.texts} so far", flush=True)
            self._told, self._quiet_until = self.cut, time.monotonic() + SECONDS_BETWEEN_LINES

    async def _scores(self, texts: tuple[list, list, list]) -> tuple[Iterator[tuple], Optional[Refused]]:
        """(scores with whether their texts were cut, why there are none), from the thread that scores."""
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, self._score, *texts)
            scores, cuts = found if isinstance(found, tuple) else (list(found), [None] * len(texts[0]))
            if len(scores) != len(texts[0]):
                raise ValueError(f"{counted(len(scores), 'score')} for {counted(len(texts[0]), 'text')}")
        except Exception as error:  # such as no memory; the next batch may fit
            reason = " ".join(str(error).split())[:200]
            return iter(()), Refused(500, f"scoring failed: {type(error).__name__}: {reason}")
        finally:
            self.batches += 1
            self.texts += len(texts[0])
            self.seconds += time.perf_counter() - started
        self.cut += sum(map(bool, cuts))
        self._tell_cuts()
        return zip(scores, cuts), None


class Service:
    """The routes: POST on any path, GET /health and GET /metrics."""

    def __init__(self, score: Score, limits: Limits):
        self._score, self._limits = score, limits
        self._door = Door(limits)

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._door.guarded(self._metrics), methods=["GET"]),
            Route("/{path:path}", self._door.guarded(self._rewards), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app):
        self._batcher = Batcher(self._score, self._limits)
        self._runs = asyncio.create_task(self._batcher.run())
        yield
        self._runs.cancel()

    async def _health(self, _request: Request) -> Response:
        return as_json(
            {"status": "ok"} if not self._runs.done() else {"status": "stopped"}, 503 * self._runs.done() or 200
        )

    async def _metrics(self, _request: Request) -> Response:
        """https://prometheus.io/docs/instrumenting/exposition_formats"""
        batcher, lines = self._batcher, []
        for name, kind, value in (
            ("texts_total", "counter", batcher.texts),
            ("truncated_texts_total", "counter", batcher.cut),
            ("batches_total", "counter", batcher.batches),
            ("scoring_seconds_total", "counter", batcher.seconds),
            ("queued_texts", "gauge", batcher.queued),
            ("held_body_bytes", "gauge", self._door.held),
        ):
            lines += [f"# TYPE serve_rm_{name} {kind}", f"serve_rm_{name} {value}"]
        lines += ["# TYPE serve_rm_answers_total counter"]
        lines += [
            f'serve_rm_answers_total{{status="{code}"}} {count}' for code, count in sorted(self._door.answers.items())
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4", headers=CLOSE)

    async def _rewards(self, request: Request) -> Response:
        async with self._door.body(request) as body:
            texts = _texts(body, self._limits.max_text)
            asked, left = asyncio.ensure_future(self._batcher.scores(*texts)), asyncio.ensure_future(gone(request))
            await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
            left.cancel()
            if not asked.done():
                asked.cancel()
                raise GONE
            return as_json(asked.result())


def _texts(body: bytes, max_text: int) -> tuple[list[str], list[str], list[bool]]:
    """Prompts, responses and finished of a request. Raises Refused if they do not fit together."""
    try:
        check_values(body, limit("request_values"))  # all other clients wait while it is read
    except BadAnswer as error:
        raise Refused(413, f"{str(error).partition(';')[0]}; send fewer texts at a time") from None
    try:
        request = json.loads(body)
        prompts, responses = request["prompts"], request["responses"]
        finished = request.get("finished")
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise Refused(400, f"{type(error).__name__}: {error}") from None
    finished = [True] * len(responses) if finished is None and isinstance(responses, list) else finished
    for name, values, kind in (("prompts", prompts, str), ("responses", responses, str), ("finished", finished, bool)):
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise Refused(400, f"{name} is not a list of {'texts' if kind is str else 'true and false'}")
    for name, values in (("prompts", prompts), ("responses", responses)):
        for number, text in enumerate(values):
            try:
                size = len(text.encode())
            except UnicodeEncodeError:  # a lone surrogate, which is valid in JSON and in no tokenizer
                raise Refused(400, f"{name}[{number}] is not Unicode text") from None
            if size > max_text:
                raise Refused(413, f"{name}[{number}] has {counted(size, 'byte')}; --max_text_kb is {max_text >> 10}")
    if not len(prompts) == len(responses) == len(finished):
        raise Refused(
            400, f"{counted(len(prompts), 'prompt')}, {counted(len(responses), 'response')}, {len(finished)} finished"
        )
    return prompts, responses, finished


def make_server(score: Score, limits: Limits) -> uvicorn.Server:
    """A uvicorn server of the service. `run(sockets=[...])` answers until SIGTERM or SIGINT, or `should_exit` is set."""
    return server_of(Service(score, limits).app(), limits)


def serve(score: Score, limits: Limits, listening: socket.socket, host: str) -> None:
    """Print the address, with the name `host`, and answer requests until SIGTERM or SIGINT."""
    print(f"scoring at {address(listening, host)}", flush=True)
    run_until_signal(make_server(score, limits), listening)

"""The HTTP service of `serve_rm`: concurrent requests share forward passes, and no client can block or fill the server.

Starlette reads and answers requests in one thread. A second thread scores. While it scores, the next batch gathers.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Optional

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.errors import UserError

BODIES_HELD = 16  # all requests together hold at most this many times the largest body
GRACEFUL_SECONDS = 10  # for running requests at shutdown
CLOSE = {"Connection": "close"}  # so that no connection waits for a second request, which uvicorn would not time
# score(prompts, responses, finished) -> one number per response
Score = Callable[[list[str], list[str], list[bool]], list[float]]


@dataclass(frozen=True)
class Limits:
    batch_size: int
    max_body: int  # bytes
    max_queue: int  # texts
    max_connections: int
    read_timeout: float  # seconds for a whole request to arrive
    api_key: Optional[str] = None
    max_text: int = 4 << 20  # bytes of one text


class Refused(Exception):
    """A request that gets no scores, with the status and the reason of the answer."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


GONE = Refused(499, "the client is gone")  # only for the count in /metrics


@dataclass
class Job:
    """The texts of one request."""

    prompts: list[str]
    responses: list[str]
    finished: list[bool]
    done: asyncio.Future
    scores: list[float] = field(default_factory=list)
    taken: int = 0  # texts that are scored, or being scored


class Batcher:
    """Scores texts of waiting jobs in common batches. Jobs share a batch equally, so none waits for a large one."""

    def __init__(self, score: Score, limits: Limits):
        self._score, self._limits = score, limits
        self._jobs: deque[Job] = deque()
        self._arrived, self._thread = asyncio.Event(), ThreadPoolExecutor(1)
        self.queued, self.batches, self.texts, self.seconds = 0, 0, 0, 0.0

    async def scores(self, prompts: list[str], responses: list[str], finished: list[bool]) -> list[float]:
        """Raises Refused if the queue is full. A request larger than the queue is taken while nothing waits."""
        if not responses:
            return []
        if self.queued and self.queued + len(responses) > self._limits.max_queue:
            raise Refused(503, f"{self.queued} texts wait; --max_queue is {self._limits.max_queue}")
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
            job.scores += [next(scores) for _ in numbers]
            if len(job.scores) == len(job.responses) and not job.done.done():
                job.done.set_result(job.scores)

    async def _scores(self, texts: tuple[list, list, list]) -> tuple[Iterator[float], Optional[Refused]]:
        """(scores, why there are none), from the thread that scores."""
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        try:
            scores = list(await loop.run_in_executor(self._thread, self._score, *texts))
            if len(scores) != len(texts[0]):
                raise ValueError(f"{len(scores)} scores for {len(texts[0])} texts")
        except Exception as error:  # such as no memory; the next batch may fit
            reason = " ".join(str(error).split())[:200]
            return iter(()), Refused(500, f"scoring failed: {type(error).__name__}: {reason}")
        finally:
            self.batches += 1
            self.texts += len(texts[0])
            self.seconds += time.perf_counter() - started
        return iter(scores), None


class Service:
    """The routes: POST on any path, GET /health and GET /metrics."""

    def __init__(self, score: Score, limits: Limits):
        self._score, self._limits = score, limits
        self._answers, self._held = Counter(), 0

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            Route("/{path:path}", self._guarded(self._rewards), methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app):
        self._batcher = Batcher(self._score, self._limits)
        self._runs = asyncio.create_task(self._batcher.run())
        yield
        self._runs.cancel()

    def _guarded(self, answer: Callable) -> Callable:
        """Check the key, and turn Refused into an answer."""

        async def endpoint(request: Request) -> Response:
            try:
                given, key = request.headers.get("Authorization", ""), self._limits.api_key
                if key and not secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
                    raise Refused(401, "the header Authorization: Bearer KEY is missing or wrong")
                response = await answer(request)
            except Refused as refused:
                response = _json({"error": refused.reason}, refused.status)
            self._answers[response.status_code] += 1
            return response

        return endpoint

    async def _health(self, _request: Request) -> Response:
        return _json(
            {"status": "ok"} if not self._runs.done() else {"status": "stopped"}, 503 * self._runs.done() or 200
        )

    async def _metrics(self, _request: Request) -> Response:
        """https://prometheus.io/docs/instrumenting/exposition_formats"""
        batcher, lines = self._batcher, []
        for name, kind, value in (
            ("texts_total", "counter", batcher.texts),
            ("batches_total", "counter", batcher.batches),
            ("scoring_seconds_total", "counter", batcher.seconds),
            ("queued_texts", "gauge", batcher.queued),
            ("held_body_bytes", "gauge", self._held),
        ):
            lines += [f"# TYPE serve_rm_{name} {kind}", f"serve_rm_{name} {value}"]
        lines += ["# TYPE serve_rm_answers_total counter"]
        lines += [f'serve_rm_answers_total{{status="{code}"}} {count}' for code, count in sorted(self._answers.items())]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4", headers=CLOSE)

    async def _rewards(self, request: Request) -> Response:
        body = bytearray()
        try:
            await self._read(request, body)
            texts = _texts(bytes(body), self._limits.max_text)
            asked, gone = asyncio.ensure_future(self._batcher.scores(*texts)), asyncio.ensure_future(_gone(request))
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not asked.done():
                asked.cancel()
                raise GONE
            return _json({"rewards": asked.result()})
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        limit = self._limits.max_body
        length = request.headers.get("Content-Length", "0")
        too_large = Refused(
            413, f"the body is larger than {limit >> 20} MB (--max_body_mb); send fewer texts at a time"
        )
        if not length.isdigit() or int(length) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.read_timeout):
                async for part in request.stream():
                    body += part
                    self._held += len(part)
                    if len(body) > limit:
                        raise too_large
                    if self._held > BODIES_HELD * limit:
                        raise Refused(503, "too many large requests at a time")
        except ClientDisconnect:
            raise GONE from None
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {self._limits.read_timeout:g} s") from None


async def _gone(request: Request) -> None:
    """Returns when the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: dict, status: int = 200) -> Response:
    # not Starlette's JSONResponse: it refuses a score of nan, which the client names in its error
    return Response(json.dumps(value), status, media_type="application/json", headers=CLOSE)


def _texts(body: bytes, max_text: int) -> tuple[list[str], list[str], list[bool]]:
    """Prompts, responses and finished of a request. Raises Refused if they do not fit together."""
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
                raise Refused(413, f"{name}[{number}] has {size} bytes; --max_text_kb is {max_text >> 10}")
    if not len(prompts) == len(responses) == len(finished):
        raise Refused(400, f"{len(prompts)} prompts, {len(responses)} responses, {len(finished)} finished")
    return prompts, responses, finished


def make_server(score: Score, limits: Limits) -> uvicorn.Server:
    """A uvicorn server of the service. `run(sockets=[...])` answers until SIGTERM or SIGINT, or `should_exit` is set."""

    idle: dict = {}  # connections without a request so far, the oldest first

    class Protocol(H11Protocol):
        """uvicorn's own, with a deadline for the head of a request, and few idle connections. uvicorn has neither."""

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            idle[self] = None
            self.loop.call_later(limits.read_timeout, self._close_without_request)
            for oldest in list(idle):
                if oldest.cycle is not None:
                    del idle[oldest]
                elif len(idle) > limits.max_connections // 2:
                    oldest._close_without_request()
                    idle.pop(oldest, None)
                else:
                    break

        def connection_lost(self, exc) -> None:
            idle.pop(self, None)
            super().connection_lost(exc)

        def _close_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    config = uvicorn.Config(
        Service(score, limits).app(),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Raises UserError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UserError("--port", f"{host}:{port}: {error.strerror}") from None


def serve(score: Score, limits: Limits, listening: socket.socket, host: str) -> None:
    """Print the address, with the name `host`, and answer requests until SIGTERM or SIGINT."""
    server = make_server(score, limits)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has shut down
        signal.signal(number, lambda *_: None)
    host = f"[{host}]" if ":" in host else host
    print(f"scoring at http://{host}:{listening.getsockname()[1]}", flush=True)
    server.run(sockets=[listening])

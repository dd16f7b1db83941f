"""An HTTP service that no client can block or fill: a key, limits of bodies and connections, and deadlines.

`serve_rm` and `serve_train` have one each, with routes of their own.
"""

import asyncio
import contextlib
import json
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer.errors import UserError
from trainer.rollout.peers import NAME_WITHOUT_KEY, is_of_web_page

BODIES_HELD = 16  # all requests together hold at most this many times the largest body
GRACEFUL_SECONDS = 10  # for running requests at shutdown
CLOSE = {"Connection": "close"}  # so that no connection waits for a second request, which uvicorn would not time


@dataclass(frozen=True, kw_only=True)
class HTTPLimits:
    max_body: int  # bytes
    max_connections: int
    read_timeout: float  # seconds for a whole request to arrive
    api_key: Optional[str] = None


class Refused(Exception):
    """A request that gets no scores, with the status and the reason of the answer."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


GONE = Refused(499, "the client is gone")  # only for the count in /metrics


class Door:
    """What every request passes: the key, the limits of bodies, and the count of answers by status."""

    def __init__(self, limits: HTTPLimits):
        self._limits, self.answers, self.held = limits, Counter(), 0

    def guarded(self, answer: Callable) -> Callable:
        """Check the key, and turn Refused into an answer. `answer(request)` returns a response."""

        async def endpoint(request: Request) -> Response:
            try:
                key = self._limits.api_key
                host = "" if key else request.headers.get("Host", "")
                if is_of_web_page(request.headers.get("Origin"), host):
                    raise Refused(403, "a web page may not ask" + NAME_WITHOUT_KEY * bool(host))
                if key and not any(secrets.compare_digest(given.encode(), key.encode()) for given in keys_of(request)):
                    raise Refused(401, "the header Authorization: Bearer KEY is missing or wrong")
                response = await answer(request)
            except Refused as refused:
                response = as_json({"error": refused.reason}, refused.status)
            self.answers[response.status_code] += 1
            return response

        return endpoint

    @contextlib.asynccontextmanager
    async def body(self, request: Request):
        """The body of a request, which counts as held inside this context. Raises Refused."""
        found = bytearray()
        try:
            await self._read(request, found)
            yield bytes(found)
        finally:
            self.held -= len(found)

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
                    self.held += len(part)
                    if len(body) > limit:
                        raise too_large
                    if self.held > BODIES_HELD * limit:
                        raise Refused(503, "too many large requests at a time")
        except ClientDisconnect:
            raise GONE from None
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {self._limits.read_timeout:g} s") from None


def keys_of(request: Request) -> list[str]:
    """The keys in the headers of a request. The SDK of Tinker sends X-API-Key."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return [key if scheme == "Bearer" else "", request.headers.get("X-API-Key", "")]


async def gone(request: Request) -> None:
    """Returns when the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_json(value: dict, status: int = 200) -> Response:
    # not Starlette's JSONResponse: it refuses a score of nan, which the client names in its error
    return Response(json.dumps(value), status, media_type="application/json", headers=CLOSE)


def server_of(app: Starlette, limits: HTTPLimits) -> uvicorn.Server:
    """A uvicorn server of `app`. `run(sockets=[...])` answers until SIGTERM or SIGINT, or `should_exit` is set."""

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
        app,
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


def address(listening: socket.socket, host: str) -> str:
    """The URL of a socket that listens, with the name `host`."""
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{listening.getsockname()[1]}"


def run_until_signal(server: uvicorn.Server, listening: socket.socket) -> None:
    """Answer requests until SIGTERM or SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has shut down
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listening])

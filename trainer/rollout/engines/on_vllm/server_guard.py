"""What a stranger may ask of our vLLM servers: nothing. A layer of ASGI around vLLM's application, by its --middleware.

vLLM's own key guards only the paths below /v1. Its development endpoints, which receive weights, have no key. This layer
opens the paths that a trainer uses, for those with the key, and closes all others.
"""

import json
import secrets
from collections.abc import Callable
from typing import Optional

from trainer.limits import limit
from trainer.rollout.peers import NAME_WITHOUT_KEY, is_of_web_page

NAME = "trainer.rollout.engines.on_vllm.server_guard.Guard"  # for --middleware
OPEN = ("/health",)
PATHS = ("/inference/v1/generate", "/collective_rpc", "/abort_requests")
METHODS = ("facts_for_trainer", "receive_trainer_weights")  # of a worker, by /collective_rpc
CLOSED = object()  # until `guard_with`: a process that does not know the key answers nobody
_key: Optional[object] = CLOSED


def guard_with(key: Optional[str]) -> None:
    """Set the key of this process. None: requests need no key, for a server on loopback."""
    global _key
    _key = key


class Guard:
    """The layer. It passes lifespan events on."""

    def __init__(self, app: Callable):
        self._app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket
        status = self._status(scope)
        if status == 200 and scope["path"] == "/collective_rpc":
            status, receive = await _checked_call(receive)
        if status != 200:
            await _refuse(status, send)
            return
        await self._app(scope, receive, send)

    def _status(self, scope: dict) -> int:
        if _key is CLOSED:
            return 503
        headers = dict(scope["headers"])
        origin, host = (headers[name].decode("latin-1") if name in headers else None for name in (b"origin", b"host"))
        if is_of_web_page(origin, (host or "") if _key is None else ""):
            return 403
        given = headers.get(b"authorization", b"")
        if _key is not None and not secrets.compare_digest(given, f"Bearer {_key}".encode()):
            return 401
        return 200 if scope["path"] in PATHS and scope["method"] == "POST" else 404


async def _checked_call(receive: Callable) -> tuple[int, Callable]:
    """(status, `receive` that gives the body again) of a call of a worker's method."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return 400, receive
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > limit("call_kb") << 10:
            return 413, receive
    try:
        method = json.loads(body)["method"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 400, receive
    told = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> dict:
        return told.pop() if told else await receive()

    return 200 if method in METHODS else 403, again


async def _refuse(status: int, send: Callable) -> None:
    reason = {
        401: "the header Authorization: Bearer KEY is missing or wrong",
        404: "closed",
        403: "no such method, or a web page asks" + NAME_WITHOUT_KEY,
    }
    body = json.dumps({"error": reason.get(status, "refused")}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

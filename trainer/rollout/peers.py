"""One reader for what less trusted peers send: a total deadline, a limit of bytes, and a checked form.

Peers are processes of environments, reward servers and rollout servers. A bad answer is a `BadAnswer`. It costs the
request or the episode that asked, and never the run.
"""

import contextlib
import functools
import http.client
import ipaddress
import json
import math
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Optional

from trainer.limits import MB, limit
from trainer.metrics import counted

HEADER = struct.Struct(">I")  # bytes of a frame
OPENS = (b",", b"[", b"{")
REFUSAL_BYTES = 4096  # of the body of a refusal that are read
NAME_LENGTH = 100  # characters of a name of a metric


class BadAnswer(ValueError):
    """What a peer sent is too large, too late, or of a wrong form."""


def answer_bytes() -> int:
    return limit("answer_mb") * MB


# --- the form


def check_values(data: bytes, most: Optional[int] = None) -> None:
    """Raise BadAnswer for JSON of more than `most` values (default: --limits values), before objects are made of it.

    Each comma and each bracket that opens, outside of texts, counts as a value. 64 MB take 0.4 s at most.
    """
    most = limit("values") if most is None else most
    if sum(map(data.count, OPENS)) <= most:
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # without escapes, a quote begins or ends a text
    num_quotes = bare.count(b'"')
    outside = b"".join(bare.split(b'"')[::2]) if num_quotes <= 4 * most else b""  # keys and values, with two each
    if num_quotes > 4 * most or sum(map(outside.count, OPENS)) > most:
        raise BadAnswer(f"JSON of more than {counted(most, 'value')}; --limits values=N raises the limit")


def read_json(data: bytes, max_values: Optional[int] = None) -> Any:
    """A JSON value. Raises BadAnswer for anything else, for one that is too deep, and for text that is not UTF-8.

    It has at most `max_values` (default: --limits values).
    """
    check_values(data, max_values)
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()  # fails for a lone surrogate, which no tokenizer takes
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"no JSON: {type(error).__name__}") from None
    return value


def read_object(data: bytes) -> dict:
    """A JSON object."""
    value = read_json(data)
    if not isinstance(value, dict):
        raise BadAnswer(f"a {type(value).__name__} instead of an object")
    return value


def read_metrics(value: Any) -> dict[str, float]:
    """{name: finite number}, with short names and not too many."""
    if not isinstance(value, dict) or len(value) > limit("metrics"):
        raise BadAnswer(f"metrics are no object of at most {limit('metrics')} numbers")
    for name, number in value.items():
        if len(name) > NAME_LENGTH or not name.isprintable():
            raise BadAnswer("a metric's name is too long, or has control characters")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) <= 1e15:
            raise BadAnswer(f"metric {name} is no finite number")
    return {name: float(number) for name, number in value.items()}


# --- requests to a server of ours


NAME_WITHOUT_KEY = (
    "; its own domain may be the Host: ask localhost or an address, or start the server with --api_key FILE"
)


def is_of_web_page(origin: Optional[str], host: str = "") -> bool:
    """Whether a page in a browser sends a request with these headers.

    It sends an Origin, or it has made its own domain a name of this machine (DNS rebinding). An address, localhost and
    a name without a dot are no such domain.
    """
    if origin is not None:
        return True
    try:
        name = (urllib.parse.urlsplit(f"//{host}").hostname or "").rstrip(".")
        if "." in name and not name.endswith(".localhost"):
            ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


# --- frames over a socket


def send_frame(connection: socket.socket, data: bytes, deadline: float = math.inf) -> None:
    """Send a length and the bytes. Raises BadAnswer if the peer does not take them until `deadline` (monotonic)."""
    _until(connection, deadline)
    try:
        connection.sendall(HEADER.pack(len(data)) + data)
    except TimeoutError:
        raise BadAnswer("does not read its requests") from None


def read_frame(connection: socket.socket, deadline: float = math.inf, max_bytes: Optional[int] = None) -> bytes:
    """The bytes of the next frame. The deadline is for all of it, not for each part.

    Raises BadAnswer for one that is late or too large, EOFError at the end of the connection.
    """
    size = HEADER.unpack(_read_exactly(connection, HEADER.size, deadline))[0]
    if size > (answer_bytes() if max_bytes is None else max_bytes):
        raise BadAnswer(f"an answer of {counted(size, 'byte')}")  # nothing of it is read
    return _read_exactly(connection, size, deadline)


def _read_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()  # grows with what comes, so a length alone takes no memory
    while len(data) < size:
        _until(connection, deadline)
        try:
            part = connection.recv(min(size - len(data), 1 << 16))
        except TimeoutError:
            raise BadAnswer("no whole answer in time") from None
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _until(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise BadAnswer("no whole answer in time")
    connection.settimeout(None if left == math.inf else left)


# --- HTTP


class Redirected(http.client.HTTPException):
    """A redirect, which is not followed: it could take a key to another host."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        raise Redirected(f"status {code} redirects to {newurl[:200]}, which is not followed; give that address itself")


def get_json(url: str, timeout: float, key: Optional[str] = None, **sizes: int) -> Any:
    """The JSON of the answer to a GET. `sizes` and errors are those of `post_json`."""
    return post_json(url, None, timeout, key, **sizes)


def post_json(
    url: str,
    body: Any,
    timeout: float,
    key: Optional[str] = None,
    max_bytes: Optional[int] = None,
    max_values: Optional[int] = None,
) -> Any:
    """The JSON of the answer to a POST of `body`; without one, to a GET. `timeout` is for the whole exchange, in seconds.

    Raises:
        TimeoutError: the whole answer did not come in time, however slowly its parts came.
        BadAnswer: it is larger than `max_bytes` or `max_values` (default: --limits answer_mb, values), or no JSON.
        urllib.error.HTTPError: another status than 200. Its `reason` is what the server says, at most 200 characters.
        OSError, http.client.HTTPException: as urllib. A redirect is refused.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    most, watched = answer_bytes() if max_bytes is None else max_bytes, _Watched(timeout)
    try:
        with watched.opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return read_json(_body(answer, most), max_values)
    except urllib.error.HTTPError as error:
        error.msg = _reason(error)
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The limit of one read may pass a moment before the timer runs: urllib then raises its own TimeoutError.
        if watched.expired or isinstance(getattr(error, "reason", error), TimeoutError):
            raise TimeoutError(f"no whole answer within {timeout:g} s") from None
        raise
    finally:
        watched.timer.cancel()


def _body(answer: http.client.HTTPResponse, most: int) -> bytes:
    data = bytearray()
    while part := answer.read(1 << 16):
        data += part
        if len(data) > most:
            raise BadAnswer(f"an answer of more than {most >> 20} MB; --limits answer_mb=N raises the limit")
    if answer.length:  # `read` of a part does not tell that the rest is missing
        raise http.client.IncompleteRead(bytes(data[:100]), answer.length)
    return bytes(data)


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says about a refusal, or the usual words of its status."""
    try:
        text = error.read(REFUSAL_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):
        return str(error.reason)
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["error"])
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:200] or str(error.reason)


class _Watched:
    """An opener of urllib whose connections are shut at the deadline. Its own limits are for each read only."""

    def __init__(self, timeout: float):
        self.expired, self._sockets = False, []
        self.timer = threading.Timer(timeout, self._expire)
        self.timer.daemon = True
        made = self._made
        plain, secure = _connection(http.client.HTTPConnection, made), _connection(http.client.HTTPSConnection, made)

        class Plain(urllib.request.HTTPHandler):
            def http_open(self, request):
                return self.do_open(plain, request)

        class Secure(urllib.request.HTTPSHandler):
            def https_open(self, request):
                return self.do_open(functools.partial(secure, context=ssl.create_default_context()), request)

        self.opener = urllib.request.build_opener(_NoRedirects, Plain, Secure)
        self.timer.start()

    def _made(self, connected: socket.socket) -> None:
        self._sockets.append(connected)
        if self.expired:
            self._expire()

    def _expire(self) -> None:
        self.expired = True
        for connected in self._sockets:
            with contextlib.suppress(OSError):  # a read that waits then ends, also one of TLS
                socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _connection(kind: type, made: Callable) -> type:
    class Connection(kind):
        def connect(self):
            super().connect()
            made(self.sock)

    return Connection

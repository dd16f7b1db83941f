"""Load for a reward server: many clients at a time, some of them slow, broken, oversized or without the key.

To measure a server: python test/serve_load.py PORT CLIENTS REQUESTS SECONDS [KEY]. It prints requests per second.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time

TEXTS = [(f"Sort: {n} {n * 7 % 10} {n * 3 % 10}", f"{n % 10} {n * 7 % 10}" + " 5" * (n % 5)) for n in range(64)]
BAD = ("half a body", "half a head", "broken", "oversized", "no key", "no lists")
PATIENCE = 120.0  # seconds until a client gives up


def message(body: bytes, key: str | None, length: int | None = None) -> bytes:
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return (head + (f"Authorization: Bearer {key}\r\n" if key else "") + "\r\n").encode() + body


async def ask(port: int, data: bytes) -> tuple[int, dict]:
    """(status, answer); (0, {}) if the server closed the connection without one."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), PATIENCE)
    try:
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if head else (0, {})


def request(number: int) -> bytes:
    prompts, responses = zip(*(TEXTS[(number + i) % len(TEXTS)] for i in range(1 + number % 3)))
    return json.dumps({"prompts": prompts, "responses": responses}).encode()


def bad_message(kind: str, body: bytes, key: str | None) -> bytes:
    return {
        "half a body": message(body[: len(body) // 2], key, len(body)),
        "half a head": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le",
        "broken": message(b"{" + body, key),
        "oversized": message(body, key, 1 << 40),
        "no key": message(body, "wrong"),
        "no lists": message(b'{"prompts": "a", "responses": [1]}', key),
    }[kind]


async def client(port: int, first: int, count: int, key: str | None, bad_every: int, answers: list) -> None:
    for number in range(first, first + count):
        body = request(number)
        if bad_every and number % bad_every == 0:
            kind = BAD[number // bad_every % len(BAD)]
            answers.append((kind, number, *await ask(port, bad_message(kind, body, key))))
        else:
            answers.append(("good", number, *await ask(port, message(body, key))))


async def load(
    port: int, clients: int, count: int, key: str | None, bad_every: int = 0, limit: float = 3600
) -> tuple[list, float]:
    """(all answers as (kind, number, status, body), seconds), as far as they come within `limit` seconds. One of
    `bad_every` requests is bad."""
    answers, started = [], time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await asyncio.gather(*(client(port, c * count, count, key, bad_every, answers) for c in range(clients)))
    return answers, time.perf_counter() - started


@contextlib.contextmanager
def serving(score, **limits):
    """The service of serve_rm in a thread, with another `score`. Gives its port."""
    from trainer.rollout.rewards.reward_service import Limits, make_server

    values = {"batch_size": 4, "max_body": 1 << 20, "max_queue": 64, "max_connections": 256, "read_timeout": 2.0}
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = make_server(score, Limits(**{**values, **limits}))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


if __name__ == "__main__":
    port, clients, count, limit = map(int, sys.argv[1:5])
    found, seconds = asyncio.run(load(port, clients, count, (sys.argv[5:] or [None])[0], limit=limit))
    good = sum(kind == "good" and status == 200 for kind, _, status, _ in found)
    print(f"{good} of {len(found)} answered, {good / seconds:.0f} requests a second")

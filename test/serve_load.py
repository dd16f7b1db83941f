"""Load for a reward server: many clients at a time, some of them slow, broken, oversized or without the key.

To measure a server: python test/serve_load.py PORT CLIENTS REQUESTS SECONDS [KEY [BAD_EVERY [PID]]]. It prints requests
per second, and how many of the good requests got right scores. A request is bad if its number is a multiple of BAD_EVERY.
With the PID of the server, it also prints its resident memory, every minute.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

TEXTS = [(f"Sort: {n} {n * 7 % 10} {n * 3 % 10}", f"{n % 10} {n * 7 % 10}" + " 5" * (n % 5)) for n in range(64)]
BAD = ("half a body", "half a head", "broken", "oversized", "no key", "no lists", "surrogate", "long text", "deep")
BAD += ("numbers", "idle", "garbage")
LONG = 20 << 10  # bytes of a text that a server with --max_text_kb 16 refuses
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
    with contextlib.suppress(ValueError):  # the answer of uvicorn itself to garbage is text
        return (int(head.split()[1]), json.loads(body)) if head else (0, {})
    return int(head.split()[1]), {}


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
        "surrogate": message(b'{"prompts": ["a"], "responses": ["\\ud800"]}', key),
        "long text": message(json.dumps({"prompts": ["a"], "responses": ["b" * LONG]}).encode(), key),
        "deep": message(b"[" * 50_000, key),
        "numbers": message(b'{"prompts": [1], "responses": [null]}', key),
        "idle": b"",
        "garbage": bytes(range(256)) + b"\r\n\r\n",
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


async def watched(pid: str, work) -> tuple[list[float], tuple[list, float]]:
    """(MB of a process every minute, from the third second on; the result of `work`)."""
    found, task = [], asyncio.ensure_future(work)
    while pid and not (await asyncio.wait([task], timeout=60 if found else 3))[0]:
        found.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return found, await task


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
    key, bad_every, pid = (sys.argv[5:] or [None])[0], int((sys.argv[6:] or [0])[0]), "".join(sys.argv[7:])
    right = {text: asyncio.run(ask(port, message(json.dumps({"prompts": [text[0]], "responses": [text[1]]}).encode(), key)))
             for text in TEXTS}  # fmt: skip
    right = {text: answer["rewards"][0] for text, (_, answer) in right.items()}
    memory, (found, seconds) = asyncio.run(watched(pid, load(port, clients, count, key, bad_every, limit=limit)))
    good = [(number, status, answer) for kind, number, status, answer in found if kind == "good"]
    wrong = 0
    for number, status, answer in good:
        expected = [right[TEXTS[(number + i) % len(TEXTS)]] for i in range(1 + number % 3)]
        near = status == 200 and all(abs(a - b) < 1e-3 for a, b in zip(answer["rewards"], expected, strict=True))
        wrong += not near
    print(f"{len(good) - wrong} of {len(good)} good requests right, {len(found) - len(good)} bad ones")
    print(f"{len(good) / seconds:.0f} good requests a second")
    print(f"endings of bad requests: {dict(Counter((kind, status) for kind, _, status, _ in found if kind != 'good'))}")
    if memory:
        print(f"resident memory in MB: {' '.join(f'{mb:.0f}' for mb in memory)}")

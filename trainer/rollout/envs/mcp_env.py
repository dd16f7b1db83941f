"""Environments with the tools of an MCP server: the trainer is its client, over stdin and stdout.

The Model Context Protocol (revision 2025-06-18) sends JSON-RPC 2.0, one message a line. This client needs no package.
"""

import contextlib
import itertools
import json
import os
import selectors
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

PROTOCOL = "2025-06-18"
NO_METHOD = -32601  # JSON-RPC's code: the client offers none of what a server may ask for, but ping


class MCPServer:
    """A server process, and requests to it, one at a time. Plain calls, from any thread."""

    def __init__(self, command: list[str], timeout: float):
        """Start `command` and read its tools. Raises RuntimeError if it does not answer."""
        self._command, self._timeout, self._lock = command, timeout, threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open until `close`)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, **pipes, bufsize=0)
        self._numbers, self._unread = itertools.count(), b""
        self._readable = selectors.DefaultSelector()
        self._readable.register(self._process.stdout, selectors.EVENT_READ)
        try:
            facts = {"capabilities": {}, "clientInfo": {"name": "trainer", "version": "1"}}
            self.request("initialize", protocolVersion=PROTOCOL, **facts)
            self._send({"method": "notifications/initialized"})
            self.tools = self._list_tools()
        except BaseException:
            self.close()
            raise

    def _list_tools(self) -> list[dict]:
        """JSON schemas of all tools, as chat templates take them. A server may give them page by page."""
        found, page = [], {}
        while page is not None:
            answer = self.request("tools/list", **page)
            found += answer["tools"]
            page = {"cursor": answer["nextCursor"]} if answer.get("nextCursor") else None
        schemas = [(tool["name"], tool.get("description") or "", tool["inputSchema"]) for tool in found]
        names = ("name", "description", "parameters")
        return [{"type": "function", "function": dict(zip(names, schema))} for schema in schemas]

    def call(self, name: str, arguments: dict) -> tuple[str, bool]:
        """(text of the result, whether the tool failed). A wrong name or wrong arguments are failures too."""
        try:
            result = self.request("tools/call", name=name, arguments=arguments)
        except ValueError as error:
            return f"error: {error}", True
        texts = [part["text"] for part in result.get("content", []) if part.get("type") == "text"]
        if not texts and "structuredContent" in result:
            texts = [json.dumps(result["structuredContent"])]
        return "\n".join(texts), bool(result.get("isError"))

    def request(self, method: str, **params: Any) -> dict:
        """The result. Raises ValueError for an error that the server answers, RuntimeError if it is gone or too slow."""
        with self._lock:
            number, deadline = next(self._numbers), time.monotonic() + self._timeout
            self._send({"id": number, "method": method, "params": params})
            while True:
                message = self._receive(method, deadline)
                if "method" in message and "id" in message:  # the server asks the client
                    answer = {"result": {}}
                    if message["method"] != "ping":
                        answer = {"error": {"code": NO_METHOD, "message": "not offered by this client"}}
                    self._send({"id": message["id"], **answer})
                elif message.get("id") == number:
                    if "error" in message:
                        raise ValueError(message["error"].get("message", "no message"))
                    return message["result"]

    def close(self) -> None:
        """End the process: without input it should end by itself."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._readable.close()
        self._errors.close()

    def _send(self, message: dict) -> None:
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        except OSError:
            raise self._lost("ended") from None

    def _receive(self, method: str, deadline: float) -> dict:
        """The next message. Lines that are no JSON object are left out."""
        while True:
            while b"\n" not in self._unread:
                if not self._readable.select(max(0.0, deadline - time.monotonic())):
                    raise self._lost(f"gave no answer to {method} in {self._timeout:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._lost("ended")
                self._unread += data
            line, _, self._unread = self._unread.partition(b"\n")
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message

    def _lost(self, what: str) -> RuntimeError:
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return RuntimeError(": ".join([f"MCP server {' '.join(self._command)} {what}", *last]))


class MCPEnvironment:
    """One episode: the model may call tools of the server. A turn without a call is its answer, which the reward scores."""

    def __init__(self, start: Callable[[], MCPServer], reward: Callable, opening: Callable, owned: bool):
        self._start, self._reward, self._opening, self._owned = start, reward, opening, owned
        self._server: Optional[MCPServer] = None
        self.tools: Optional[list[dict]] = None
        self.metrics = {"tool_calls": 0.0, "tool_errors": 0.0}

    def reset(self, task: dict) -> list[dict]:
        self._task, self._server = task, self._start()
        self.tools = self._server.tools
        return self._opening(task)

    def step(self, response: Any) -> Any:
        if not response.tool_calls:
            return float(self._reward(self._task, str(response))), True
        messages = []
        for call in response.tool_calls:
            text, failed = self._server.call(call["name"], call["arguments"])
            self.metrics["tool_calls"] += 1
            self.metrics["tool_errors"] += failed
            messages.append({"role": "tool", "name": call["name"], "content": text})
        return messages

    def close(self) -> None:
        if self._owned and self._server is not None:
            self._server.close()


def opening_of(task: dict) -> list[dict]:
    """The first messages of a row: its column `messages`, or else its column `prompt` or `question`."""
    value = next((task[name] for name in ("messages", "prompt", "question") if name in task), None)
    if value is None:
        raise ValueError(f"no column messages, prompt or question: {', '.join(task)}")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def from_mcp(
    command: list[str],
    reward: Callable[[dict, str], float],
    opening: Callable[[dict], list[dict]] = opening_of,
    shared: bool = False,
    timeout: float = 30.0,
) -> Callable[[], MCPEnvironment]:
    """What `--env` needs for the tools of an MCP server: `make_environment = from_mcp(["python", "server.py"], reward)`.

    `reward(task, answer)` scores the last turn. Each episode has a server of its own. With `shared`, all episodes of a rank
    use one, which must then keep nothing of an episode. `timeout` is the limit of one request, in seconds.
    """
    lock, kept = threading.Lock(), []

    def start() -> MCPServer:
        if not shared:
            return MCPServer(command, timeout)
        with lock:
            if not kept:
                kept.append(MCPServer(command, timeout))
            return kept[0]

    return lambda: MCPEnvironment(start, reward, opening, owned=not shared)

"""Environments with the tools of an MCP server: the trainer starts it and is its client, over stdin and stdout.

The package `mcp` (extra `mcp`) speaks the Model Context Protocol and checks the form of every answer. The limits of what
a server may send are checked here: a deadline for its start and for each call, and sizes of each message.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Optional

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

from trainer.errors import UserError
from trainer.limits import limit
from trainer.rollout.envs.tool_env import ToolEnvironment, opening_of
from trainer.rollout.peers import BadAnswer, answer_bytes, check_values

try:
    from mcp import Client, MCPError
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage
    from mcp_types import CallToolResult, TextContent, jsonrpc_message_adapter
except ImportError:  # an optional extra
    raise UserError("trainer.rollout.envs.mcp_env", "mcp is not installed", "pip install -e '.[mcp]'") from None

STOP_SECONDS = 1.0  # until a server without input is killed
ERROR_BYTES = 4096  # the end of stderr, whose last line says why a server ended


class MCPServer:
    """A server process, and calls of its tools, one at a time. Plain calls, from any thread."""

    def __init__(self, command: list[str], timeout: Optional[float] = None, env: Optional[dict[str, str]] = None):
        """Start `command` and read its tools. Raises ConnectionError if it does not answer within `timeout` seconds
        (default: --limits answer_s).

        Of this process's environment, the server gets HOME, PATH and a few like them, and then `env`.
        """
        self._command, self._timeout, self._env = command, timeout or limit("answer_s"), env or {}
        self._lock, self._resources = threading.Lock(), contextlib.ExitStack()
        self._end = ""  # how the connection ended
        self._errors = b""  # the end of stderr; a file could fill the disk
        self._portal = self._resources.enter_context(start_blocking_portal())  # an event loop in a thread
        self._closing = self._portal.call(anyio.Event)
        atexit.register(self.close)  # while the portal's thread still runs
        try:
            _, self._client = self._portal.start_task(self._connect)
        except Exception as error:
            found = self._loss(error, "initialize or tools/list") or _first(error)
            self.close()
            raise found from None

    async def _connect(self, *, task_status: TaskStatus[Client]) -> None:
        """Start the server, and hold the connection until `close`."""
        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # no server may fill the screen with its mistakes
        with anyio.fail_after(self._timeout) as scope:
            # the handshake of `legacy` is in every revision of the protocol
            async with Client(self._streams(), mode="legacy", cache=None) as client:
                self.tools = await _list_tools(client)
                scope.deadline = math.inf
                task_status.started(client)
                await self._closing.wait()

    def call(self, name: str, arguments: dict) -> tuple[str, bool]:
        """(text of the result, whether the tool failed). A wrong name, wrong arguments and an answer of a wrong form are
        failures too. Raises ConnectionError if the server ends, is too slow, or sends too much."""
        with self._lock:
            try:
                result = self._portal.call(self._call, name, arguments)
            except (MCPError, RuntimeError, TimeoutError, ValueError) as error:
                if loss := self._loss(error, "tools/call"):
                    raise loss from None
                return f"error: {_one_line(error)}", True
        texts = [part.text for part in result.content if isinstance(part, TextContent)]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        return "\n".join(texts), bool(result.is_error)

    async def _call(self, name: str, arguments: dict) -> CallToolResult:
        with anyio.fail_after(self._timeout):
            return await self._client.call_tool(name, arguments)

    def close(self) -> None:
        """End the process: without input it should end by itself."""
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the portal is closed already
            self._portal.call(self._closing.set)
        self._resources.close()

    def _loss(self, error: Exception, request: str) -> Optional[ConnectionError]:
        """The error of a server that ended or was too slow; None if it answered `request` with `error`."""
        end = f"gave no answer to {request} in {self._timeout:g} s" if isinstance(error, TimeoutError) else self._end
        if not end:
            return None
        last = self._errors.decode(errors="replace").strip().splitlines()[-1:]
        return ConnectionError(": ".join([f"MCP server {' '.join(self._command)} {end}", *last]))

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple]:
        """The process of the server, as the two streams of messages that a `Client` takes.

        `mcp.client.stdio` does the same, but it reads a line of any length, and its servers leave the process group that
        --env_sandbox kills.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=get_default_environment() | self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=answer_bytes(),
        )
        arrived, to_client = anyio.create_memory_object_stream[SessionMessage](0)
        from_client, to_send = anyio.create_memory_object_stream[SessionMessage](0)
        has_errors = anyio.Event()

        async def receive() -> None:
            with arrived, contextlib.suppress(anyio.BrokenResourceError):
                try:
                    async for line in process.stdout:
                        check_values(line)
                        with contextlib.suppress(ValueError):  # a line that is no message is left out
                            await arrived.send(SessionMessage(jsonrpc_message_adapter.validate_json(line)))
                    self._end = "ended"
                    with anyio.move_on_after(STOP_SECONDS):  # a child of the server may hold stderr open
                        await has_errors.wait()
                except BadAnswer as error:
                    self._end = f"sent {error}"
                except ValueError:  # of asyncio, for the limit
                    self._end = f"sent a message of more than {limit('answer_mb')} MB; --limits answer_mb=N raises it"

        async def keep_errors() -> None:
            while part := await process.stderr.read(1 << 16):
                self._errors = (self._errors + part)[-ERROR_BYTES:]
            has_errors.set()

        async def send() -> None:
            with to_send, contextlib.suppress(OSError):  # the server has closed its input
                async for message in to_send:
                    line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                tasks.start_soon(send)
                tasks.start_soon(keep_errors)
                with to_client, from_client:
                    yield to_client, from_client
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the input of a server and drop what it still writes. Kill it if it does not end."""

    async def ended() -> None:
        while await process.stdout.read(1 << 16):
            pass
        await process.wait()

    process.stdin.close()
    with anyio.move_on_after(STOP_SECONDS):
        await ended()
    if process.returncode is None:
        process.kill()
        with anyio.move_on_after(STOP_SECONDS):  # a child of the server may hold its output open
            await ended()
    process._transport.close()  # nothing public closes that output


async def _list_tools(client: Client) -> list[dict]:
    """JSON schemas of all tools, as chat templates take them. A server may give them page by page."""
    found, cursor, size = [], None, 0
    for _ in range(limit("pages")):
        page = await client.list_tools(cursor=cursor)
        new = [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in page.tools
        ]
        found += new
        size += len(json.dumps(new))
        cursor = page.next_cursor
        if not cursor or size > answer_bytes():
            break
    return [{"type": "function", "function": schema} for schema in found]


def _first(error: BaseException) -> BaseException:
    """The error itself, which task groups put into groups."""
    while isinstance(error, BaseExceptionGroup):  # noqa: F821 (it is in Python 3.11)
        error = error.exceptions[0]
    return error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class MCPEnvironment(ToolEnvironment):
    """One episode with the tools of a server."""

    def __init__(self, start: Callable[[], MCPServer], reward: Callable, opening: Callable, owned: bool):
        super().__init__(reward, opening)
        self._start, self._owned = start, owned
        self._server: Optional[MCPServer] = None

    def reset(self, task: dict) -> list[dict]:
        self._server = self._start()
        self.tools = self._server.tools
        return super().reset(task)

    def call(self, name: str, arguments: dict) -> tuple[str, bool]:
        return self._server.call(name, arguments)

    def close(self) -> None:
        if self._owned and self._server is not None:
            self._server.close()


def from_mcp(
    command: list[str],
    reward: Callable[[dict, str], float],
    opening: Callable[[dict], list[dict]] = opening_of,
    shared: bool = False,
    timeout: Optional[float] = None,
    env: Optional[dict[str, str]] = None,
) -> Callable[[], MCPEnvironment]:
    """What `--env` needs for the tools of an MCP server: `make_environment = from_mcp(["python", "server.py"], reward)`.

    `reward(task, answer)` scores the last turn. Each episode has a server of its own. With `shared`, all episodes of a rank
    use one, which must then keep nothing of an episode. `timeout` is the limit of the start and of each call, in seconds
    (default: --limits answer_s).
    `env` holds further environment variables of the server.
    """
    lock, kept = threading.Lock(), []

    def start() -> MCPServer:
        if not shared:
            return MCPServer(command, timeout, env)
        with lock:
            if not kept:
                kept.append(MCPServer(command, timeout, env))
            return kept[0]

    return lambda: MCPEnvironment(start, reward, opening, owned=not shared)

"""A small server of the package `mcp` over stdin and stdout. Its tools come on two pages."""

import os
import sys
import time

import anyio
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import INVALID_PARAMS, CallToolResult, ListToolsResult, TextContent, Tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [Tool(name=name, description=f"{name} of two numbers", input_schema=SCHEMA) for name in ("add", "die", "hang")]
NAME = os.urandom(4).hex()  # in sandboxes, several servers have the same number
SEEN = ("TOKEN", "GIVEN")  # variables of its environment that `add` reports


async def list_tools(_context, params) -> ListToolsResult:
    if params is not None and params.cursor == "more":
        return ListToolsResult(tools=TOOLS[1:])
    return ListToolsResult(tools=TOOLS[:1], next_cursor="more")


async def call_tool(context, params) -> CallToolResult:
    if params.name == "die":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(1)
    if params.name == "hang":
        time.sleep(60)
    if params.name != "add":
        raise MCPError(INVALID_PARAMS, f"no tool {params.name}")
    await context.session.send_log_message("info", "adding")
    await context.session.send_ping()  # it asks the client, too
    seen = "".join(f" {os.environ[name]}" for name in SEEN if name in os.environ)
    try:
        text, failed = f"{params.arguments['a'] + params.arguments['b']} by {os.getpid()}-{NAME}{seen}", False
    except KeyError as error:
        text, failed = f"missing: {error}", True
    return CallToolResult(content=[TextContent(text=text)], is_error=failed)


async def main() -> None:
    print("no JSON, which a client leaves out", flush=True)
    server = Server("test", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)

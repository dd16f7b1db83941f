"""A small MCP server over stdin and stdout, by the text of the protocol. Its tools come on two pages."""

import json
import os
import sys
import time

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
TOOLS = [
    {"name": name, "description": f"{name} of two numbers", "inputSchema": SCHEMA} for name in ("add", "die", "hang")
]


def send(**message) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(method: str, params: dict) -> dict:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "t"},
        }
    if method == "tools/list":
        return {"tools": TOOLS[1:]} if params.get("cursor") == "more" else {"tools": TOOLS[:1], "nextCursor": "more"}
    if params["name"] == "die":
        sys.exit("out of luck")
    if params["name"] == "hang":
        time.sleep(60)
    if params["name"] != "add":
        raise LookupError(f"no tool {params['name']}")
    send(method="notifications/message", params={"level": "info", "data": "adding"})
    send(id="mine", method="ping")  # it asks the client, too
    assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "mine", "result": {}}
    try:
        text, failed = f"{params['arguments']['a'] + params['arguments']['b']} by {os.getpid()}", False
    except KeyError as error:
        text, failed = f"missing: {error}", True
    return {"content": [{"type": "text", "text": text}], "isError": failed}


def main() -> None:
    print("no JSON, which a client leaves out", flush=True)
    ready = False
    for line in sys.stdin:
        message = json.loads(line)
        assert message["jsonrpc"] == "2.0" and (
            ready or message["method"] in ("initialize", "notifications/initialized")
        )
        ready = ready or message["method"] == "notifications/initialized"
        if "id" in message:
            try:
                send(id=message["id"], result=answer(message["method"], message["params"]))
            except LookupError as error:
                send(id=message["id"], error={"code": -32602, "message": str(error)})


if __name__ == "__main__":
    main()

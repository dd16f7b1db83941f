"""Read the messages of a conversation, and the tools that it may call, from a row.

They raise UserError if a value has another type than its key needs.
"""

import json
from typing import Any

from trainer.datasets.rows import AsWritten, kind_of
from trainer.errors import UserError

ROLES = {"human": "user", "gpt": "assistant"}  # the role names of `conversations` data


def messages_of(value: Any, where: str) -> list[dict]:
    """Return messages with role and content, also from {from, value}. Keys without a value are dropped."""
    if not isinstance(value, list):
        raise UserError(where, kind_of(value), "a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        message = _without_none(message)
        if isinstance(message, dict) and "from" in message and "role" not in message:
            message = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where} message {number}", "no role", "an object with role and content, or from and value"
            )
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""  # only a tool call: templates differ on a missing content, but all accept ""
        if not isinstance(message.get("content"), str):
            allowed = "a text; or parts of texts and images, in rows with a column images"
            raise UserError(f"{where} message {number}", "its content is not a text", allowed)
        messages.append(message)
    return messages


def as_messages(row: Any, key_flag: str, key: str, role: str) -> list[dict]:
    """The messages under `key`, which the flag `key_flag` named. A text becomes one message of `role`."""
    if isinstance(row[key], str):
        return [{"role": role, "content": row[key]}]
    return messages_of(row[key], f"{key_flag} {key}")


def tools_of(row: Any) -> list[dict] | None:
    """Return the JSON schemas of functions in the column `tools`, or None. A row has a list or its JSON text."""
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = json.loads(value, object_hook=AsWritten) if value.strip() else None
        except json.JSONDecodeError as error:
            raise UserError("column tools", f"broken JSON ({error.msg})", "a list of objects, or its JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError("column tools", "not a list of objects", "a list of objects, or its JSON")
    return [tool if isinstance(tool, AsWritten) else _without_none(tool) for tool in value]


def _without_none(value: Any) -> Any:
    """Drop keys with the value None, which a template would print. A null written in a tool's arguments stays."""
    if isinstance(value, dict):
        present = {key: child for key, child in value.items() if child is not None}
        kept = {key for key, child in present.items() if key == "arguments" and isinstance(child, AsWritten)}
        return {key: child if key in kept else _without_none(child) for key, child in present.items()}
    return [_without_none(child) for child in value] if isinstance(value, list) else value

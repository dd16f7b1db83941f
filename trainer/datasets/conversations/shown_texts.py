"""Refuse a chat template that leaves out a message, a call or the tools of a conversation."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from trainer.datasets.conversations.control_tokens import BREAK
from trainer.datasets.conversations.messages import THOUGHTS
from trainer.datasets.conversations.rendering import probed
from trainer.datasets.images.image_marks import MARK
from trainer.errors import UserError

REMEDY = "a template that shows it via --tokenizer_chat_template, or rows without it"
FORMAT = ("id", "type", "index", "function")  # keys of a call that are no texts of the model
# keys of a message that `check_shown`, the loss or the thoughts take care of, or that only connect messages
OTHERS = ("role", "content", "tool_calls", "tool_call_id", "id", *THOUGHTS)
_unseen: dict[tuple, list[int]] = {}  # by template and roles


def check_shown(
    messages: list[dict], tools: list | None, text: str, render: Callable[[list[dict]], str], key: tuple
) -> None:
    """Check that `text`, a conversation by its template, has the text of each message, each call and the tools.

    `render(messages)` is the text of other messages with the same tools; `key` is what else decides it. White space
    does not count. JSON may escape a text. A template may shorten earlier turns of the assistant, as it does when the
    model answers the last one: such a turn may stand only in the text that ends with it.
    Raises: UserError that names the message.
    """
    shown = _squash(text)
    for tool in tools or []:
        # a tool of the model's own has only a type
        name = tool["function"].get("name") if "function" in tool else tool.get("name", tool.get("type"))
        for text in [name] if isinstance(name, str) else _strings(tool):
            if not _is_in(text, shown):
                raise UserError("the chat template", f"does not show the tool {text!r}", REMEDY)
    for number, message in enumerate(messages, 1):
        missing = [part for part in _parts(message) if not _is_in(part, shown)]
        if missing and message["role"] == "assistant" and number < len(messages):
            earlier = _squash(render(messages[:number]))
            missing = [part for part in missing if not _is_in(part, earlier)]
        if missing:
            raise _left_out(number, message, missing[0])
    for number in _left_out_by_role([message["role"] for message in messages], render, key):
        if (messages[number - 1].get("content") or "").strip():
            raise _left_out(number, messages[number - 1], messages[number - 1]["content"])


def unshown_keys(messages: list[dict], text: str) -> set[str]:
    """The keys of messages whose texts the rendered conversation lacks: a template may read a key for one role only."""
    shown = _squash(text)
    found = ((key, value) for message in messages for key, value in message.items() if key not in OTHERS)
    return {key for key, value in found if isinstance(value, str) and value.strip() and not _is_in(value, shown)}


def has_trimmed(messages: list[dict], text: str) -> bool:
    """Whether the rendered conversation has the text of a message without the white space at its ends."""
    parts = [part for message in messages for part in _texts_of(message) if part.strip() not in ("", part)]
    lost = [part for part in parts if not any(form in text for form in (part, *_json_forms(part)))]
    return any(part.strip() in text for part in lost)


def _left_out_by_role(roles: list[str], render: Callable[[list[dict]], str], key: tuple) -> list[int]:
    """The messages that the template leaves out of a conversation of these roles, whose texts are found nowhere else.

    A short text may stand in the conversation by chance. Calls of tools need more than a role, so they are left alone.
    """
    if "tool" in roles:
        return []
    key = (*key, *roles)
    if key not in _unseen:
        marks = [f"Q{number}mark{number}Q" for number in range(len(roles))]
        talk = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        text = probed(lambda: render(talk), "".join(marks))
        _unseen[key] = [number for number, mark in enumerate(marks, 1) if mark not in text]
    return _unseen[key]


def _left_out(number: int, message: dict, part: str) -> UserError:
    part = part.replace(BREAK, "")
    found = f"leaves out {part[:40] + '...' * (len(part) > 40)!r} of message {number} ({message['role']})"
    return UserError("the chat template", found, REMEDY)


def _parts(message: dict) -> Iterator[str]:
    """The texts of a message that a template has to show: not thoughts, which templates may drop."""
    yield from _texts_of(message)
    for call in message.get("tool_calls") or []:
        for part in (call, call.get("function") or {}):
            yield from _strings([child for key, child in part.items() if key not in FORMAT])


def _texts_of(message: dict) -> list[str]:
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    return content.split(MARK)


def _strings(value: Any) -> Iterator[str]:
    """The texts and names of a call's JSON values, but for the names of the format."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
    elif isinstance(value, dict):
        is_call = "name" in value and "arguments" in value
        for key, child in value.items():
            if not is_call:
                yield key
            yield from _strings(child)


def _squash(text: str) -> str:
    return "".join(text.split())


def _is_in(part: str, shown: str) -> bool:
    if _squash(part) in shown:
        return True
    return any(_squash(form) in shown for form in _json_forms(part.strip()))


def _json_forms(text: str) -> set[str]:
    return {json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)}

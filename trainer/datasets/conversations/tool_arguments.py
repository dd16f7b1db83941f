"""The arguments of tool calls in the form that a chat template reads: an object or its JSON text. Data has both."""

import json
from functools import lru_cache
from typing import Any

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.control_tokens import BREAK
from trainer.errors import UserError

OBJECT, TEXT = "object", "text"
PROBE = {"q7": "v7"}


def fit_arguments(tokenizer: Any, template: str, messages: list[dict]) -> list[dict]:
    """The messages, with the arguments of each call as the template takes them.

    Qwen2.5 writes an object as JSON, and would quote a JSON text again. DeepSeek takes only a text.
    Raises: UserError for a text that is not the JSON of an object where the template needs one.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages
    options = training_templates.special_tokens(tokenizer) | getattr(tokenizer, "template_args", {})
    form = _form(template, json.dumps(options, sort_keys=True))
    return [
        {**m, "tool_calls": [_fit_call(call, form, number) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for number, m in enumerate(messages, 1)
    ]


@lru_cache
def _form(template: str, options: str) -> str | None:
    """OBJECT or TEXT if the template takes only this form of arguments; None if it takes both, or shows no calls."""
    as_object, as_text = (_probe(template, given, json.loads(options)) for given in (PROBE, json.dumps(PROBE)))
    takes_object = "q7" in as_object and str(PROBE) not in as_object  # not as Python writes it
    takes_text = json.dumps(PROBE) in as_text
    return None if takes_object == takes_text else OBJECT if takes_object else TEXT


def _probe(template: str, arguments: Any, options: dict) -> str:
    """The text of a conversation with one call, or "" if the template refuses it."""
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": arguments}}
    for content in ("", None):  # DeepSeek shows calls only of a message without content
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            text = training_templates.with_blocks(template, [training_templates.QUESTION, message], None, options)[0]
        except training_templates.RAISED:
            continue
        if "q7" in text:
            return text
    return ""


def _fit_call(call: dict, form: str | None, number: int) -> dict:
    function = call.get("function", call)
    given = function.get("arguments")
    if form == TEXT and isinstance(given, dict):
        given = json.dumps(given, ensure_ascii=False)
    elif form == OBJECT and isinstance(given, str):
        given = _object(given, f"message {number}: the arguments of a call of {function.get('name')}")
    fitted = {**function, "arguments": given} if "arguments" in function else function
    return {**call, "function": fitted} if "function" in call else fitted


def _object(text: str, where: str) -> dict:
    try:
        value = json.loads(text) if text.strip(f"{BREAK} \n") else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(where, f"the text {text[:60]!r}", "an object, or the JSON of an object")
    return value

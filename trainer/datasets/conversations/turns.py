"""What stands between two turns of the model: ids of its chat template, and the tool calls in a generated turn.

A generated turn is never tokenized again. Only the ids after it come from the template.
"""

import json
import re
import secrets
from typing import Any, Optional

from trainer.datasets.conversations.control_tokens import ids_behind
from trainer.datasets.conversations.rendering import render
from trainer.datasets.conversations.templates import as_data
from trainer.datasets.conversations.tokens import is_stop_token
from trainer.errors import UserError

# It stands for the generated turn; where it ends in the rendered text, the next messages begin. Random per run: a text
# of a tool that spells out the mark would move that place.
MARK = f"Q{secrets.token_hex(8)}Q"
CALL_ID = "call00000"  # templates of Mistral want ids of nine letters and digits

QWEN_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
HARMONY_CALL = re.compile(r"to=functions\.([\w.-]+)[^{}]*?<\|message\|>(.*?)(?:<\|call\|>|$)", re.DOTALL)
MISTRAL_CALLS = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
LLAMA_CALL = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*(?:<\|[a-z_]+\|>)?\s*", re.DOTALL)


def continuation_ids(
    tokenizer: Any,
    opening: list[dict],
    messages: list[dict],
    *,
    tools: Optional[list] = None,
    call: Optional[str] = None,
    stop_token: Optional[int] = None,
) -> list[int]:
    """The ids from the end of a generated turn to the start of the next one: rest of the turn, `messages`, header.

    The template renders `opening`, a stand-in for the turn, and `messages` with the generation prompt. The result is
    the ids after the stand-in. So earlier turns, which many templates shorten, change nothing. If a `stop_token` ended
    the turn, it replaces the template's. `call` is the function that the turn called; templates name it before a tool's
    answer.

    For a template <user>hi<assistant>yes<end>, a turn without stop token and the message "more", the result is the ids
    of <end><user>more<assistant>.

    Raises: UserError if the template refuses the conversation or does not end a turn with a stop token.
    """
    stand_ins: list[dict[str, Any]] = [{"role": "assistant", "content": MARK}]
    if messages[0]["role"] == "tool":
        messages = [{"tool_call_id": CALL_ID, **message} for message in messages]
        function = {"name": messages[0].get("name") or call or "tool", "arguments": {"text": MARK}}
        calls = [{"id": messages[0]["tool_call_id"], "type": "function", "function": function}]
        stand_ins.insert(0, {"role": "assistant", "content": "", "tool_calls": calls})
    for stand_in in stand_ins:  # the second one if the template does not show calls
        before = _rendered(tokenizer, [*opening, stand_in], tools, False)
        after = _rendered(tokenizer, [*opening, stand_in, *messages], tools, True)
        if MARK in before and MARK in after:
            break
    else:
        raise UserError("the chat template", "does not show the text of an assistant turn", "another template")
    ids = ids_behind(tokenizer, after, MARK)
    end = next((i for i, token in enumerate(ids) if is_stop_token(tokenizer, token)), None)
    if end is None:
        raise UserError("the chat template", "ends no assistant turn with a special token", "a template that does")
    if stop_token is None:
        return ids[end:]
    # GLM has no token for the end of a turn: the first token of the next message ends it
    own_end = any(is_stop_token(tokenizer, token) for token in ids_behind(tokenizer, before, MARK))
    return ids[end + 1 :] if own_end or ids[end] == stop_token else ids[end:]


def _rendered(tokenizer: Any, messages: list[dict], tools: list | None, asks: bool) -> str:
    """The text of the conversation, with breaks in the control tokens of its messages and tools."""
    messages, tools = as_data(tokenizer, messages, tools)
    return render(tokenizer, messages, tokenize=False, tools=tools, add_generation_prompt=asks)


def tool_calls(text: str) -> list[dict]:
    """The calls in a generated turn with its special tokens: [{"name": ..., "arguments": {...}}], in their order.

    It knows the formats of Qwen and Hermes, of harmony (gpt-oss), of Llama 3 and of Mistral. A call that is not a JSON
    object is left out.
    """
    found = [_call(part) for part in QWEN_CALL.findall(text)]
    found += [_call(json.dumps({"name": name}), arguments) for name, arguments in HARMONY_CALL.findall(text)]
    if match := MISTRAL_CALLS.search(text):
        found += [_call(json.dumps(part)) for part in _parsed(match[1]) or []]
    if not found and (match := LLAMA_CALL.fullmatch(text)):
        found = [_call(match[1])]
    return [call for call in found if call]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(text: str, arguments: Optional[str] = None) -> Optional[dict]:
    call = _parsed(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    given = call.get("arguments", call.get("parameters", {})) if arguments is None else _parsed(arguments)
    given = _parsed(given) if isinstance(given, str) else given
    return {"name": call["name"], "arguments": given} if isinstance(given, dict) else None

"""What stands between two turns of the model: ids of its chat template.

A generated turn is never tokenized again. Only the ids after it come from the template.
"""

import os
import secrets
from typing import Any, Optional

from trainer.datasets.conversations.control_tokens import BREAK, ids_behind, is_stop_token
from trainer.datasets.conversations.rendering import chat_template, render
from trainer.datasets.conversations.templates import as_data
from trainer.datasets.conversations.tool_formats import names_format, tool_calls
from trainer.errors import UserError

# It stands for the generated turn; where it ends in the rendered text, the next messages begin. Random per run: a text
# of a tool that spells out the mark would move that place.
MARK = f"Q{secrets.token_hex(8)}Q"
CALL_ID = "call00000"  # templates of Mistral want ids of nine letters and digits


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
    ids, own = ids_behind(tokenizer, after, MARK), ids_behind(tokenizer, before, MARK)
    ends = [place for place, token in enumerate(ids) if is_stop_token(tokenizer, token)]
    # a call may end with marks of its own, as LFM2's with <|tool_call_end|>: the last token of the turn ends it
    ends = [place for place in ends if place < len(os.path.commonprefix([ids, own]))][-1:] or ends  # noqa: RUF071
    end = ends[0] if ends else None
    if end is None:
        raise UserError("the chat template", "ends no assistant turn with a special token", "a template that does")
    if stop_token is None:
        return ids[end:]
    # GLM has no token for the end of a turn: the first token of the next message ends it
    own_end = any(is_stop_token(tokenizer, token) for token in own)
    return ids[end + 1 :] if own_end or ids[end] == stop_token else ids[end:]


def _rendered(tokenizer: Any, messages: list[dict], tools: list | None, asks: bool) -> str:
    """The text of the conversation, with breaks in the control tokens of its messages and tools."""
    messages, tools = as_data(tokenizer, messages, tools)
    return render(tokenizer, messages, tokenize=False, tools=tools, add_generation_prompt=asks)


PROBE = {
    "name": "q7tool",
    "description": "q7",
    "parameters": {"type": "object", "properties": {"q7": {"type": "string"}}},
}
_read_back: dict[str, bool] = {}  # by template


def check_call_format(tokenizer: Any, tools: Optional[list]) -> None:
    """Check that a call of a tool, as the chat template shows it, is read as a call. Nothing to check without tools.

    Raises: UserError if it is not: the calls of the model would then be scored as answers.
    """
    if not tools:
        return
    template = chat_template(tokenizer, tools)
    if template not in _read_back:
        asked, schema = [{"role": "user", "content": "q7"}], [{"type": "function", "function": PROBE}]
        function = {"name": PROBE["name"], "arguments": {"q7": "v7"}}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
        }
        text = _rendered(tokenizer, [*asked, call], schema, False)
        # without the header too, which Llama's calls cannot have; its end may be that of another turn
        befores = [_rendered(tokenizer, asked, schema, asks) for asks in (False, True)]
        turns = [text[len(os.path.commonprefix([text, before])) :].replace(BREAK, "") for before in befores]  # noqa: RUF071
        is_read = any(tool_calls(turn, schema) == [function] for turn in turns)
        # Falcon-H1's template tells the model the format, and shows no calls
        _read_back[template] = is_read or (PROBE["name"] not in turns[0] and names_format(befores[0]))
    if not _read_back[template]:
        found = "shows calls of tools in a format that is not known here, or not at all"
        raise UserError("the chat template", found, "a template with one of the formats in docs/environments.md")

"""The text and the token ids that a chat template gives for a conversation."""

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.content_parts import with_parts
from trainer.datasets.conversations.control_tokens import encode, inside
from trainer.errors import UserError
from trainer.limits import TooLarge, time_limit, within_memory

FLAG = "--tokenizer_chat_template"
UNDEFINED = re.compile(r"'(\w+)' is undefined")


def chat_template(tokenizer: Any, tools: list | None = None) -> str:
    """The template that renders a conversation with or without tools. Raises UserError if there is none."""
    if not tokenizer.chat_template:
        found = "missing, and the tokenizer has no chat template for turns"
        raise UserError(FLAG, found, "chatml or another name, a file, a Jinja text")
    if isinstance(tokenizer.chat_template, list):
        getattr(tokenizer, "of_texts", tokenizer).chat_template = templates_by_name(tokenizer)
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError("--apply_chat_template", " ".join(str(error).split()), f"a template via {FLAG}") from None


def templates_by_name(tokenizer: Any) -> dict[str, str]:
    """The templates of a tokenizer with several of them, else {}. A program may set a list, as its file has it."""
    found = tokenizer.chat_template
    if not isinstance(found, list):
        return found if isinstance(found, dict) else {}
    try:
        return {one["name"]: one["template"] for one in found}
    except (KeyError, TypeError):
        allowed = "a text, or a list of objects with name and template"
        raise UserError("--pretrain", "its chat template is a list of something else", allowed) from None


def note_of_choice(tokenizer: Any, tools: list | None) -> set[str]:
    """The line that names which of several templates renders a conversation, with or without tools."""
    template, named = chat_template(tokenizer, tools), templates_by_name(tokenizer)
    chosen = next((name for name in named if named[name] == template), None)
    rows = "rows with tools" if tools else "rows without tools"
    return {f"{rows}: chat template {chosen!r} of {', '.join(sorted(named))}"} if chosen else set()


def render(
    tokenizer: Any,
    messages: list[dict],
    *,
    tokenize: bool = True,
    offsets: bool = False,
    marks: bool = False,
    **options: Any,
) -> Any:
    """Token ids (or the text) of the conversation.

    `offsets`: the ids, and for each its characters (start, end) in the text; none without a fast tokenizer.
    `marks`: also a third list, with 1 for each id in a {% generation %} block.
    `options` are arguments of the template, besides those of --template_args.
    """
    options = {**getattr(tokenizer, "template_args", {}), **options}
    try:
        with time_limit("template_s", training_templates.WHERE):
            values = (tokenizer, messages, tokenize, marks, options)
            out, blocks = within_memory("template_mb", training_templates.WHERE, _rendered, *values)
    except training_templates.RAISED as error:
        raise _refused(error) from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return out if offsets or marks or not tokenize else out[0]
    if not tokenize:
        return out
    input_ids, places = encode(tokenizer, out)
    if not marks:
        return (input_ids, places) if offsets else input_ids
    if not tokenizer.is_fast:
        raise UserError("the chat template", "has {% generation %} markers, which need a fast tokenizer", "one without")
    return input_ids, places, inside(blocks, places)


def probed(show: Callable[[], Any], refused: Any) -> Any:
    """What `show` renders of a conversation of our own, or `refused`: a template may refuse it but accept the rows.

    It may do so in any way, with errors of its own. Raises TooLarge: no other conversation would end either.
    """
    try:
        return show()
    except TooLarge:
        raise
    except Exception:
        return refused


def _rendered(tokenizer: Any, messages: list[dict], tokenize: bool, marks: bool, options: dict) -> tuple[Any, list]:
    """(text, places of its {% generation %} blocks). For a row with images, in place of the text, what its tokenizer gives."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # of a row with images
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, marks=marks, **options), []
    template = chat_template(tokenizer, options.get("tools"))
    messages = [with_parts(message, template, images=False) for message in messages]
    if not marks:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options), []
    options = options | training_templates.special_tokens(tokenizer) | {"return_assistant_tokens_mask": True}
    texts, blocks = render_jinja_template(conversations=[messages], chat_template=template, **options)
    return texts[0], blocks[0]


def _refused(error: Exception) -> UserError:
    """What the template says of a conversation. A name without a value is told with its cure."""
    message = " ".join((repr(error) if isinstance(error, LookupError) else str(error)).split())
    if not (match := UNDEFINED.fullmatch(message)):
        return UserError("the chat template", f"cannot render this conversation: {message}")
    name = match[1]
    if not name.endswith("_token"):
        found = f"uses {name}, which nothing sets"
        return UserError(
            "the chat template", found, f"--template_args '{{\"{name}\": ...}}', or another template via {FLAG}"
        )
    found = f"writes {name}, and the tokenizer has none"
    wanted = f'{name} in tokenizer_config.json, --template_args \'{{"{name}": ""}}\' to leave it out, or another template via {FLAG}'
    return UserError("the chat template", found, wanted)

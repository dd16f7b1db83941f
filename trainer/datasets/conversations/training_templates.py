"""Training versions of known chat templates: the stock template's text, with marks around what the model itself writes.

`chat_templates/NAME.jinja` has one {% generation %} block per assistant message. The block holds the text that the
model writes at inference, with its end token. It is empty for a message that the template changes: the stock templates
of reasoning models drop the thoughts of earlier turns.
"""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.datasets.conversations.control_tokens import encode
from trainer.limits import time_limit, within_memory

WHERE = "the chat template"
# what a template can raise: also its filters and methods of texts, such as {{ '{a}'.format() }}
RAISED = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
FOLDER = Path(__file__).parent / "chat_templates"
# templates by name that belong to no family of models
PLAIN = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
}
SYSTEM = {"role": "system", "content": "Be short."}
QUESTION = {"role": "user", "content": " 1 + 1? "}
ANSWER = {"role": "assistant", "content": "2\n"}
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1.5, "b": True}}}
# Conversations that tell the templates apart: a stock template is known by the texts that it gives for them.
PROBES = [
    ([QUESTION], {"add_generation_prompt": True, "enable_thinking": True}),
    ([QUESTION, ANSWER, {"role": "user", "content": "3?"}, {**ANSWER, "reasoning_content": "a"}], {}),
    ([SYSTEM, QUESTION, ANSWER], {}),
    ([SYSTEM, SYSTEM, QUESTION, ANSWER], {}),
    ([QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}], {}),
]


@lru_cache
def names() -> list[str]:
    """The names of our templates, as --tokenizer_chat_template takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


@lru_cache
def read(name: str) -> str:
    """The text of a training template. name: one of names()."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def is_ours(template: str) -> bool:
    """Whether the text is one of our training templates."""
    return template in map(read, names())


def training_version(tokenizer: Any, template: str) -> str | None:
    """The training template with the same text as `template`, or `template` if it is one of them, or None."""
    return _version_of(template, tuple(sorted(special_tokens(tokenizer).items())))


@lru_cache
def _version_of(template: str, tokens: tuple) -> str | None:
    if is_ours(template):
        return template
    versions = [read(name) for name in names()]
    expected = [_text(template, messages, dict(tokens) | options) for messages, options in PROBES]
    for version in versions if any(expected) else []:
        pairs = zip(PROBES, expected, strict=True)
        if all(_text(version, messages, dict(tokens) | options) == text for (messages, options), text in pairs):
            return version
    return None


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """bos_token, eos_token and so on, as a template finds them."""
    return {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


def _text(template: str, messages: list[dict], options: dict) -> str | None:
    """The text of a conversation, or None if the template refuses it."""
    try:
        return with_blocks(template, messages, None, options)[0]
    except RAISED:
        return None


def with_blocks(
    template: str, messages: list[dict], tools: list | None, options: dict
) -> tuple[str, list[tuple[int, int]]]:
    """The text and, for each assistant message, the first character of its block and the one after its last.

    Raises RAISED if the template refuses the conversation, and UserError if it takes too much time or memory.
    """
    marked = is_ours(template)
    show = partial(render_jinja_template, chat_template=template, return_assistant_tokens_mask=marked, **options)
    with time_limit("template_s", WHERE):
        texts, blocks = within_memory("template_mb", WHERE, partial(show, conversations=[messages], tools=tools))
    return texts[0], blocks[0] if marked else []


def written_spans(
    tokenizer: Any, template: str, messages: list[dict], tools: list | None, text: str
) -> tuple[list[int], list[tuple[int, int]], dict[int, tuple[int, int]]] | None:
    """Ids, their offsets, and {message: (start, end)}, the tokens of each assistant message that the model wrote; end = start if none.

    text: the conversation, by the tokenizer's template. None if the training version of `template` is unknown, gives
    another text, or has no block per assistant message. A token that reaches over the border is the answer's.
    """
    version = training_version(tokenizer, template)
    if version is None or not tokenizer.is_fast:
        return None
    try:
        rendered, blocks = with_blocks(
            version, messages, tools, special_tokens(tokenizer) | getattr(tokenizer, "template_args", {})
        )
    except RAISED:
        return None
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if rendered != text or len(blocks) != len(turns):
        return None
    input_ids, offsets = encode(tokenizer, text)
    spans = {}
    for turn, (first, end) in zip(turns, blocks, strict=True):
        inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > first]
        spans[turn] = (inside[0], inside[-1] + 1) if inside else (0, 0)
    return input_ids, offsets, spans

"""Conversations to token ids and a loss mask by the chat template; a mask that cannot be verified is refused."""

import os
import re
from itertools import groupby
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from trainer.datasets.rows import is_stop_token
from trainer.errors import UserError

FLAG = "--tokenizer_chat_template"
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REMEDY = f"a template with {{% generation %}} markers via {FLAG}"


def load_chat_template(value: str | None, tokenizer: Any) -> None:
    """Set tokenizer.chat_template to a Jinja text or to what a file holds; None leaves the tokenizer's own."""
    if value is None:
        return
    template = value
    if not _is_jinja(value):
        if not os.path.isfile(value):
            raise UserError(
                FLAG, f"{value!r} is neither a file nor a Jinja template", "a path, or a text with {{ or {%"
            )
        with open(value, encoding="utf-8") as file:
            template = file.read()
        if not _is_jinja(template):
            raise UserError(FLAG, f"{value} holds no Jinja template", "a text with {{ or {%")
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(FLAG, f"Jinja error in line {error.lineno}: {error.message}") from None
    except (TemplateError, TypeError, ValueError):  # it may well refuse this conversation; the rows decide
        pass


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def chat_template(tokenizer: Any, tools: list | None = None) -> str:
    """The template that renders a conversation with or without tools; raises UserError where there is none."""
    if not tokenizer.chat_template:
        raise UserError("--apply_chat_template", "the tokenizer has no chat template", f"a template via {FLAG}")
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError("--apply_chat_template", " ".join(str(error).split()), f"a template via {FLAG}") from None


def render_chat(
    tokenizer: Any, messages: list[dict], *, multiturn: bool, tools: list | None = None
) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of a conversation: the template's own tokens, 1 on what the assistant has to produce. `tools`
    are JSON schemas of functions that it may call, which the template shows to it.

    That is the last assistant turn or, with multiturn, each; from the first token after the generation prompt to the
    token that ends the turn, which is trained, while white space after it is not. An empty answer is not trained.
    Messages after the last trained turn are left out: they carry no loss and change none.

    The mask comes from the template's {% generation %} markers where it has them, else from the difference between
    the conversation up to the turn and the conversation with it; either is checked to hold the answer's text.
    Raises UserError where the template or the tokenizer leaves that in doubt.
    """
    template = chat_template(tokenizer, tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [i for i in (turns if multiturn else turns[-1:]) if _has_answer(messages[i])]
    if not trained:
        input_ids = _render(tokenizer, messages, tools=tools) if messages else []
        return input_ids, [0] * len(input_ids)
    messages = messages[: trained[-1] + 1]
    find_spans = _marked_spans if GENERATION_TAG.search(template) else _difference_spans
    input_ids, spans = find_spans(tokenizer, messages, trained, tools)
    loss_mask = [0] * len(input_ids)
    for turn, (start, end) in spans.items():
        _check_span(tokenizer, template, messages[turn], turn, input_ids[start:end])
        loss_mask[start:end] = [1] * (end - start)
    return input_ids, loss_mask


def render_prompt(tokenizer: Any, messages: list[dict], tools: list | None = None) -> list[int]:
    """input_ids of a conversation that the assistant is to answer. Raises UserError where the template refuses it."""
    chat_template(tokenizer, tools)
    return _render(tokenizer, messages, add_generation_prompt=True, tools=tools)


def _has_answer(message: dict) -> bool:
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


def _render(tokenizer: Any, messages: list[dict], *, tokenize: bool = True, **options: Any) -> Any:
    """Token ids (or the text) of the conversation; with return_assistant_tokens_mask, the ids and the mask."""
    try:
        out = tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=tokenize, **options)
    except (TemplateError, TypeError, ValueError) as error:
        found = f"cannot render this conversation: {' '.join(str(error).split())}"
        raise UserError("the chat template", found) from None
    if not tokenize:
        return out
    input_ids = list(out["input_ids"])
    return (input_ids, list(out["assistant_masks"])) if "assistant_masks" in out else input_ids


def _marked_spans(
    tokenizer: Any, messages: list[dict], trained: list[int], tools: list | None
) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Ids and {turn: (start, end)} by the {% generation %} markers: one run of marked tokens per assistant turn."""
    input_ids, mask = _render(tokenizer, messages, return_assistant_tokens_mask=True, tools=tools)
    runs, start = [], 0
    for marked, group in groupby(mask):
        end = start + len(list(group))
        if marked:
            runs.append((start, end))
        start = end
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(runs) != len(turns):  # markers around the bare content leave an empty answer without a token
        turns = [i for i in turns if _has_answer(messages[i])]
    if len(runs) != len(turns):
        found = f"its {{% generation %}} markers mark {len(runs)} runs of tokens for {len(turns)} assistant turns"
        raise UserError("the chat template", found, "one marked block per assistant turn")
    return input_ids, {turn: run for turn, run in zip(turns, runs, strict=True) if turn in trained}


def _difference_spans(
    tokenizer: Any, messages: list[dict], trained: list[int], tools: list | None
) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Ids and {turn: (start, end)} by what a turn adds to the conversation before it.

    <user>hi<assistant>yes<end>\\n<user>...: the prompt of turn 1 is <user>hi<assistant>, so its span is yes<end>.
    """
    input_ids = _render(tokenizer, messages, tools=tools)
    spans = {}
    for turn in trained:
        start = _prefix_length(tokenizer, messages, turn, input_ids, prompt=True, tools=tools)
        end = len(input_ids)
        if turn + 1 < len(messages):
            end = _prefix_length(tokenizer, messages, turn + 1, input_ids, prompt=False, tools=tools)
        spans[turn] = (start, _after_stop_token(tokenizer, input_ids, start, end))
    return input_ids, spans


def _prefix_length(
    tokenizer: Any, messages: list[dict], num: int, input_ids: list[int], *, prompt: bool, tools: list | None
) -> int:
    """How many of the conversation's ids its first num messages (and the generation prompt) make up; checked."""
    if num == 0:
        raise UserError("the chat template", "cannot tell an assistant turn that opens the conversation", REMEDY)
    head = messages[:num]
    ids = _render(tokenizer, head, add_generation_prompt=prompt, tools=tools)
    if input_ids[: len(ids)] == ids:
        return len(ids)
    text = _render(tokenizer, head, tokenize=False, add_generation_prompt=prompt, tools=tools)
    if not _render(tokenizer, messages, tokenize=False, tools=tools).startswith(text):
        raise _rewrites(messages, num)
    # The text is a prefix, so the tokenizer merged over the border ("\n" + "\nyes"): the merged token is the answer's.
    return next(
        (i for i, (a, b) in enumerate(zip(ids, input_ids, strict=False)) if a != b), min(len(ids), len(input_ids))
    )


def _rewrites(messages: list[dict], num: int) -> UserError:
    if num < len(messages) - 1 or messages[num]["role"] != "assistant":
        found = f"renders the first {num} messages differently once others follow, so earlier turns cannot be masked"
        return UserError("the chat template", found, f"{REMEDY}, or the last turn only (no --multiturn)")
    found = "renders its generation prompt differently from the start of the answer, so the answer cannot be masked"
    return UserError("the chat template", found, REMEDY)


def _after_stop_token(tokenizer: Any, input_ids: list[int], start: int, end: int) -> int:
    """The end of the turn: behind its stop token if only white space follows that, else where the turn's text ends."""
    for position in range(end - 1, start - 1, -1):
        if is_stop_token(tokenizer, input_ids[position]):
            return position + 1
        if tokenizer.decode([input_ids[position]]).strip():
            break
    return end


def _check_span(tokenizer: Any, template: str, message: dict, turn: int, ids: list[int]) -> None:
    """The masked tokens must hold the answer; both sides go through the tokenizer, which may be lossy."""
    masked = _squash(tokenizer, ids)
    answer = _squash(
        tokenizer, tokenizer((message.get("content") or "").strip(), add_special_tokens=False)["input_ids"]
    )
    if answer not in masked:
        found = f"the tokens masked as message {turn + 1} do not hold its text: the template changes or misplaces it"
        raise UserError("the chat template", found, REMEDY)
    marked = GENERATION_TAG.search(template)
    if not marked and "add_generation_prompt" not in template and not masked.startswith(answer):
        found = "ignores add_generation_prompt, so the header of a turn cannot be told from the answer"
        raise UserError("the chat template", found, REMEDY)


def _squash(tokenizer: Any, ids: list[int]) -> str:
    """Decoded text without white space, which templates trim and tokenizers move."""
    return "".join(tokenizer.decode(ids, clean_up_tokenization_spaces=False).split())


def check_input_template(input_template: str | None) -> None:
    """Raises UserError for an --input_template that does not say where the text goes, once."""
    if input_template is not None and input_template.count("{}") != 1:
        raise UserError("--input_template", f"{input_template.count('{}')} times {{}}", "exactly one {}")

"""Turn conversations into token ids and a loss mask with the chat template. A mask that fails its check is refused."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from jinja2 import TemplateSyntaxError

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.control_tokens import (
    broken,
    broken_messages,
    changes_texts,
    check_end,
    is_escaped,
    notes_of_end,
    reads_controls,
    whole,
)
from trainer.datasets.conversations.difference_masks import REMEDY, difference_spans
from trainer.datasets.conversations.lost_characters import lost_letters
from trainer.datasets.conversations.messages import THOUGHTS, TRAIN, reads
from trainer.datasets.conversations.rendering import (
    FLAG,
    chat_template,
    note_of_choice,
    probed,
    render,
    templates_by_name,
)
from trainer.datasets.conversations.shown_texts import check_shown, has_trimmed, unshown_keys
from trainer.datasets.conversations.tool_arguments import fit_arguments
from trainer.datasets.rows import json_text
from trainer.datasets.shapes.columns import TEMPLATE_ARGS
from trainer.datasets.shapes.notes import Notes, summed
from trainer.datasets.text_flags import is_jinja, read_arguments
from trainer.errors import UserError
from trainer.metrics import counted

REASON = "it drops the thoughts, or calls of tools do not fit its format"
KEY_ASKS = ("its key asks for a loss", "no such key")
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
LOST = (
    "WARNING: {} of {:turn of the assistant has|turns of the assistant have} no loss: the chat template shows them otherwise than the model writes "
    "them, such as without their thoughts (--train_on last, or a template that keeps them, cures that)"
)
TRIMMED = "the chat template leaves out white space at the ends of messages ({:row})"
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TAKES_CALLS_WITHOUT_CONTENT = re.compile(r"content'?\]? is none")
_frames: dict[tuple[str, ...], str] = {}  # by template and special tokens
_ends: dict[tuple, set[str]] = {}  # by template, its arguments, tools and normalizer
MARK_OF_TURN = re.compile(r"<[|｜][^\s<>{}'\"]+[|｜]>|<(?:start|end)_of_turn>|<turn[|]>|<[|]turn>")


def prepare_tokenizer(tokenizer: Any, template: str | None, arguments: str | None, read_control_tokens: bool) -> None:
    """Set what the flags say about texts: the chat template, its arguments, and whether texts hold control tokens.

    `arguments` is a JSON object. Raises: UserError like `load_chat_template`, and for arguments that do nothing.
    """
    load_chat_template(template, tokenizer)
    if read_control_tokens:
        tokenizer.reads_control_tokens = True
    values = read_arguments(arguments)
    if values is None:
        return
    _check_arguments(tokenizer, values, "--template_args")
    tokenizer.template_args = values


def _check_arguments(tokenizer: Any, values: dict, where: str) -> None:
    """Check that the chat template names each argument, and that the run does not set it. Raises UserError."""
    texts = templates_by_name(tokenizer) or {"": tokenizer.chat_template or ""}
    unused = [name for name in values if not any(re.search(rf"\b{re.escape(name)}\b", t) for t in texts.values())]
    if unused or (taken := RESERVED & values.keys()):
        found = (
            f"the chat template has no argument {unused[0]!r}" if unused else f"{sorted(taken)[0]!r} is set by the run"
        )
        raise UserError(where, found, "arguments that the template names")


@contextmanager
def arguments_of_row(tokenizer: Any, value: Any) -> Iterator[None]:
    """Inside, the template also has the arguments of a row's column, over those of --template_args.

    `value` is an object, its JSON text, or None. Raises: UserError for another value, and like --template_args.
    """
    where, before = f"column {TEMPLATE_ARGS}", getattr(tokenizer, "template_args", {})
    try:
        given = json_text(value or "{}") if isinstance(value, str) else value or {}
    except ValueError as error:
        raise UserError(where, f"broken JSON ({error})", "a JSON object") from None
    if not isinstance(given, dict):
        raise UserError(where, repr(value)[:60], "an object")
    given = {name: child for name, child in given.items() if child is not None}  # other rows have this key
    _check_arguments(tokenizer, given, where)
    if not given:
        yield
        return
    tokenizer.template_args = {**before, **given}
    try:
        yield
    finally:
        if before:
            tokenizer.template_args = before
        else:
            del tokenizer.template_args  # it would be part of the tokenizer's state


def load_chat_template(value: str | None, tokenizer: Any) -> None:
    """Set tokenizer.chat_template to the template of a name, a file, or a Jinja text. None keeps the tokenizer's own.
    A name is that of one of the tokenizer's own templates, or of ours.

    Raises: UserError for a file that does not exist, and for a text that is not a valid Jinja template.
    """
    if value is None:
        return
    template, names = value, [*training_templates.names(), *training_templates.PLAIN]
    own = templates_by_name(tokenizer)
    if value in own:
        template = own[value]
    elif value in names:
        template = training_templates.PLAIN.get(value) or training_templates.read(value)
        _check_marks(value, template, tokenizer)
    elif not is_jinja(value):
        if not os.path.isfile(value):
            known = ", ".join([*own, *names])
            found = f"{value!r} is neither a name, nor a file, nor a Jinja template"
            raise UserError(FLAG, found, f"a path, a text with {{{{ or {{%, or one of {known}")
        try:
            with open(value, encoding="utf-8") as file:
                template = file.read()
        except UnicodeDecodeError:
            raise UserError(FLAG, f"{value} is not UTF-8 text", "a Jinja template in UTF-8") from None
        if not is_jinja(template):
            raise UserError(FLAG, f"{value} holds no Jinja template", "a text with {{ or {%")
    tokenizer.chat_template = template
    try:
        talk = [{"role": "user", "content": "x"}]
        training_templates.with_blocks(template, talk, None, training_templates.special_tokens(tokenizer))
    except TemplateSyntaxError as error:
        raise UserError(FLAG, f"Jinja error in line {error.lineno}: {error.message}") from None
    except training_templates.RAISED:  # it may refuse this conversation but accept the rows
        pass


def _check_marks(name: str, template: str, tokenizer: Any) -> None:
    """Check that the tokenizer has the marks of the template's turns. Else each would become several tokens of text."""
    talk = [training_templates.QUESTION, training_templates.ANSWER, training_templates.QUESTION]
    options = {"bos_token": "", "eos_token": ""} | training_templates.special_tokens(tokenizer)
    options["add_generation_prompt"] = True
    text = training_templates.with_blocks(template, talk, None, options)[0]
    missing = [mark for mark in dict.fromkeys(MARK_OF_TURN.findall(text)) if mark not in tokenizer.get_vocab()]
    if missing:
        found = f"{name} writes {', '.join(missing)}, and the tokenizer has no such token"
        raise UserError(FLAG, found, "a template of this model's family, or a file")


def render_chat(
    tokenizer: Any,
    messages: list[dict],
    *,
    multiturn: bool,
    tools: list | None = None,
    notes: Notes | None = None,
    asks: tuple[str, str] = KEY_ASKS,
) -> tuple[list[int], list[int]]:
    """Render a conversation to (input_ids, loss_mask): the template's own tokens, and 1 on the assistant's tokens.

    tools: JSON schemas of functions that the assistant may call. The template shows them in the prompt.
    notes: those of the row. They get the turns with a loss, keys that are not shown, and that messages are left out.
    asks: why a message whose key `train` is true must have a loss, and what cures it, for the refusal of one that cannot.

    The last assistant turn is trained, or each one with multiturn, unless a message says it by its key `train`. A turn begins
    after the generation prompt and ends with its stop token. The stop token is trained, but white space after it is not. An
    empty answer is not trained.
    Messages after the last trained turn are left out: they have no loss and change none.

    A stock template of a known model is masked by its training version, which has the same text. There, only a turn
    that the text shows as the model wrote it is trained, so not one whose thoughts the template drops.
    Else the mask comes from the template's {% generation %} markers. Without them, it is the difference between the
    conversation before the turn and the conversation with it. In each case it must hold the answer's text.

    Raises: UserError if the template or the tokenizer leaves doubt about the mask.
    """
    template, notes = chat_template(tokenizer, tools), notes or Notes()
    flags = {turn: message[TRAIN] for turn, message in enumerate(messages) if TRAIN in message}
    trained, messages = trained_turns(messages, multiturn)
    messages, tools = as_data(tokenizer, messages, tools)
    if flags:
        notes.facts.add("keys weight, loss, loss_mask or train of messages say whether their turns have a loss")
    if not multiturn:
        notes.facts.add("loss on the last turn of the assistant (--train_on all: every turn)")
    if not trained:
        input_ids = render(tokenizer, messages, tools=tools) if messages else []
        return input_ids, [0] * len(input_ids)
    if messages[trained[-1] + 1 :]:
        notes.facts.add(
            summed("{:row ends|rows end} with messages after the last turn with a loss, which are left out")
        )
    messages = messages[: trained[-1] + 1]
    marked = GENERATION_TAG.search(template)
    found, text = None, render(tokenizer, messages, tokenize=False, tools=tools)
    _check_shown(tokenizer, messages, tools, text, notes)
    if not marked or training_templates.is_ours(template):
        found = training_templates.written_spans(tokenizer, template, messages, tools, text)
    exact = bool(marked or found)
    if not found:
        found = (
            _marked_spans(tokenizer, messages, tools)
            if marked
            else difference_spans(tokenizer, messages, trained, tools, text)
        )
    input_ids, offsets, spans = found
    spans = {turn: span for turn, span in spans.items() if turn in trained and span[1] > span[0]}
    if not spans:
        where = f"message {trained[-1] + 1}" if len(trained) == 1 else "every answer"
        raise UserError("the chat template", f"does not show {where} as the model writes it: {REASON}", REMEDY)
    lost = [turn for turn in trained if turn not in spans]
    if asked := [turn for turn in lost if flags.get(turn)]:
        found = f"does not show message {asked[0] + 1} as the model writes it, and {asks[0]}: {REASON}"
        raise UserError("the chat template", found, f"{REMEDY}, or {asks[1]}")
    if multiturn:
        notes.facts.add(summed(LOST, len(lost), len(trained), without="loss on every turn of the assistant"))
    loss_mask = [0] * len(input_ids)
    for turn, (start, end) in spans.items():
        shown = text[offsets[start][0] : offsets[end - 1][1]] if offsets else input_ids[start:end]
        _check_span(tokenizer, template, messages[turn], turn, shown, exact)
        loss_mask[start:end] = [1] * (end - start)
    return input_ids, loss_mask


def render_prompt(
    tokenizer: Any, messages: list[dict], tools: list | None = None, notes: Notes | None = None
) -> list[int]:
    """input_ids of a conversation that the assistant has to answer. Raises UserError if the template refuses it.

    notes: those of the row. They get the keys of messages that the text does not show.
    """
    messages, tools = as_data(tokenizer, trained_turns(messages, False)[1], tools)
    text = render(tokenizer, messages, tokenize=False, add_generation_prompt=True, tools=tools)
    _check_shown(tokenizer, messages, tools, text, notes or Notes())
    input_ids, offsets = render(tokenizer, messages, add_generation_prompt=True, tools=tools, offsets=True)
    check_end(tokenizer, text, offsets)
    return input_ids


def notes_of_template(tokenizer: Any, tools: list | None = None) -> set[str]:
    """Which of several templates is used, and the warning for one whose prompts lose their end where they are tokenized
    without an answer (Strip)."""
    chosen = note_of_choice(tokenizer, tools)
    if not changes_texts(tokenizer):
        return chosen
    normalizer = repr(getattr(tokenizer, "of_texts", tokenizer).backend_tokenizer.normalizer)
    key = (chat_template(tokenizer, tools), repr(getattr(tokenizer, "template_args", None)), bool(tools), normalizer)
    if key not in _ends:
        asked = [{"role": "user", "content": "x"}]
        options = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
        text = probed(lambda: render(tokenizer, asked, **options), "")
        _ends[key] = notes_of_end(tokenizer, text, opens=False)
    return chosen | _ends[key]


def _check_shown(tokenizer: Any, messages: list[dict], tools: list | None, text: str, notes: Notes) -> None:
    def texts(others: list[dict]) -> str:
        return render(tokenizer, others, tokenize=False, tools=tools)

    key = chat_template(tokenizer, tools), repr(getattr(tokenizer, "template_args", None)), bool(tools)
    check_shown(messages, tools, text, texts, key)
    notes.keys |= unshown_keys(messages, text)
    if has_trimmed(messages, text):
        notes.facts.add(summed(TRIMMED))


def _frame(tokenizer: Any) -> str:
    """The text of the template around messages: what opens, closes and separates turns."""
    special = training_templates.special_tokens(tokenizer).values()
    key = (str(tokenizer.chat_template), *special)
    if key not in _frames:
        talk = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ]
        shown = partial(render, tokenizer, tokenize=False)
        talks = [(talk[:1], True), (talk[:2], False), (talk, True)]
        texts = [probed(partial(shown, part, add_generation_prompt=asks), "") for part, asks in talks]
        _frames[key] = " ".join([*filter(None, texts), *special])
    return _frames[key]


def trained_turns(messages: list[dict], multiturn: bool) -> tuple[list[int], list[dict]]:
    """The numbers of the turns with a loss, and the messages as the template sees them, without the key `train`."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [i for i in turns if messages[i].get(TRAIN, multiturn or i == turns[-1])]
    trained = [i for i in wanted if _has_answer(messages[i])]
    return trained, [{key: value for key, value in message.items() if key != TRAIN} for message in messages]


def _without_empty_content(template: str, messages: list[dict]) -> list[dict]:
    """The messages, with content None in those that only call tools if the template (DeepSeek) asks for that."""
    if not TAKES_CALLS_WITHOUT_CONTENT.search(template):
        return messages
    return [{**m, "content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]


def _has_answer(message: dict) -> bool:
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


def as_data(tokenizer: Any, messages: list[dict], tools: list | None = None) -> tuple[list[dict], list | None]:
    """Messages and tools as the template takes them, with broken control tokens, which `encode` reads as plain text.

    Raises: UserError if the template gives another text with broken tokens than with whole ones.
    """
    template = chat_template(tokenizer, tools)
    messages = fit_arguments(tokenizer, template, _without_empty_content(template, messages))
    if reads_controls(tokenizer):
        return messages, tools
    marked = broken_messages(tokenizer, messages, _frame(tokenizer))
    marked_tools = broken(tokenizer, tools)
    if (marked, marked_tools) == (messages, tools):
        return messages, tools
    text = render(tokenizer, marked, tokenize=False, tools=marked_tools)
    if whole(text) != render(tokenizer, messages, tokenize=False, tools=tools) or is_escaped(text):
        found = "changes a text with control tokens, so they cannot be read as plain text"
        raise UserError("the chat template", found, "texts without them, or --read_control_tokens")
    return marked, marked_tools


def _marked_spans(
    tokenizer: Any, messages: list[dict], tools: list | None
) -> tuple[list[int], list[tuple[int, int]], dict[int, tuple[int, int]]]:
    """Ids, offsets and {turn: (start, end)} by the {% generation %} markers: one run of tokens per assistant turn."""
    input_ids, offsets, mask = render(tokenizer, messages, marks=True, tools=tools)
    runs, start = [], 0
    for marked, group in groupby(mask):
        end = start + len(list(group))
        if marked:
            runs.append((start, end))
        start = end
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(runs) != len(turns):  # markers around the content only give an empty answer no token
        turns = [i for i in turns if _has_answer(messages[i])]
    if len(runs) != len(turns):
        found = f"its {{% generation %}} markers mark {counted(len(runs), 'run')} of tokens for {counted(len(turns), 'assistant turn')}"
        raise UserError("the chat template", found, "one marked block per assistant turn")
    return input_ids, offsets, dict(zip(turns, runs, strict=True))


def _check_span(tokenizer: Any, template: str, message: dict, turn: int, shown: str | list[int], exact: bool) -> None:
    """Check that `shown`, the text of the masked tokens, holds the answer and the names of its tool calls.

    Without a fast tokenizer, `shown` are the ids. Then all texts pass through the tokenizer, which may be lossy.
    exact: markers say where the answer begins.
    """
    by_ids = not isinstance(shown, str)

    def as_shown(text: str) -> str:
        return _squash(
            tokenizer, tokenizer(whole(text).strip(), add_special_tokens=False)["input_ids"] if by_ids else text
        )

    masked, answer = _squash(tokenizer, shown), as_shown(message.get("content") or "")
    # `messages_of` refuses those that no template reads
    read = [key for key in THOUGHTS if isinstance(message.get(key), str) and reads(template, key)]
    thoughts = [as_shown(message[key]) for key in read]
    names = [as_shown((call.get("function") or call).get("name") or "") for call in message.get("tool_calls") or []]
    if any(text not in masked for text in (answer, *thoughts)) or any(
        masked.count(name) < names.count(name) for name in names
    ):
        if lost := lost_letters(tokenizer, message.values()):
            raise UserError(
                "the tokenizer", f"drops {' '.join(sorted(lost))} of message {turn + 1}", "another tokenizer"
            )
        found = f"the tokens masked as message {turn + 1} do not hold its text: the template changes or misplaces it"
        raise UserError("the chat template", found, REMEDY)
    if not exact and "add_generation_prompt" not in template and not masked.startswith(answer):
        found = "ignores add_generation_prompt, so the header of a turn cannot be separated from the answer"
        raise UserError("the chat template", found, REMEDY)


def _squash(tokenizer: Any, text: str | list[int]) -> str:
    """The text, also of ids, without white space, which templates trim, and without <think> tags, which prompts may hold."""
    if not isinstance(text, str):
        text = tokenizer.decode(text, clean_up_tokenization_spaces=False)
    text = "".join(whole(text).split())
    return text.replace("<think>", "").replace("</think>", "")

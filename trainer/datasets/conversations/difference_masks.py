"""Which tokens an assistant turn adds to the conversation before it: the mask of a template without markers."""

import re
from typing import Any

from trainer.datasets.conversations.control_tokens import first_behind, is_stop_token
from trainer.datasets.conversations.rendering import FLAG, chat_template, render
from trainer.errors import UserError
from trainer.metrics import counted

REMEDY = f"a template with {{% generation %}} markers via {FLAG}"


def difference_spans(
    tokenizer: Any, messages: list[dict], trained: list[int], tools: list | None, text: str
) -> tuple[list[int], list[tuple[int, int]], dict[int, tuple[int, int]]]:
    """Ids, offsets in `text` and {turn: (start, end)} of the tokens that a turn adds to the conversation before it.

    In <user>hi<assistant>yes<end>\\n<user>..., the prompt of turn 1 is <user>hi<assistant>. So its span is yes<end>.
    `text` is the conversation by the template. A tokenizer without a fast version has no offsets.
    """
    input_ids, offsets = render(tokenizer, messages, tools=tools, offsets=True)
    spans = {}
    for turn in trained:
        ends = {"tools": tools, "text": text, "offsets": offsets}
        start, end = _prefix_length(tokenizer, messages, turn, input_ids, prompt=True, **ends), len(input_ids)
        if turn + 1 < len(messages):
            end = _prefix_length(tokenizer, messages, turn + 1, input_ids, prompt=False, **ends)
        # the text, not the token: a normalizer may put letters before white space (Prepend)
        texts = [text[a:b] for a, b in offsets[start:end]] if offsets else map(tokenizer.decode, input_ids[start:end])
        spans[turn] = (start, _after_stop_token(tokenizer, input_ids, start, list(texts)))
    return input_ids, offsets, spans


def _prefix_length(
    tokenizer: Any,
    messages: list[dict],
    num: int,
    input_ids: list[int],
    *,
    prompt: bool,
    tools: list | None,
    text: str,
    offsets: list[tuple[int, int]],
) -> int:
    """Count the conversation's ids that belong to its first num messages (and the generation prompt); checked."""
    if num == 0:
        raise UserError("the chat template", "does not mark an assistant turn that opens the conversation", REMEDY)
    for switch in _switches(chat_template(tokenizer, tools)) if prompt else [{}]:
        options = {"add_generation_prompt": prompt, "tools": tools, **switch}
        head = render(tokenizer, messages[:num], tokenize=False, **options)
        # Not by the ids of the head: its last tokens are others if the tokenizer merged over the border ("\n" + "\nyes"),
        # or if its normalizer strips the end of a text. A token that reaches over the border is the answer's.
        if offsets and text.startswith(head):
            return first_behind(offsets, len(head))
        ids = render(tokenizer, messages[:num], **options)
        pairs = zip(ids, input_ids, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(input_ids)))
        if shared == len(ids) or text.startswith(head) or (not prompt and _only_closes(tokenizer, ids, shared)):
            return shared
    raise _rewrites(messages, num)


def _switches(template: str) -> list[dict[str, bool]]:
    """Arguments that change the generation prompt: Nemotron opens thoughts there, and an answer may have none."""
    names = [name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)]
    return [{}, *({name: value} for name in names for value in (False, True))]


def _only_closes(tokenizer: Any, ids: list[int], shared: int) -> bool:
    """Whether ids behind `shared` only close a conversation (Phi-3 writes eos there), after the stop token of its turn."""

    def is_blank(token: int) -> bool:
        return not tokenizer.decode([token]).strip()

    last = next((token for token in reversed(ids[:shared]) if not is_blank(token)), None)
    rest = all(is_stop_token(tokenizer, token) or is_blank(token) for token in ids[shared:])
    return rest and last is not None and is_stop_token(tokenizer, last)


def _rewrites(messages: list[dict], num: int) -> UserError:
    if num < len(messages) - 1 or messages[num]["role"] != "assistant":
        found = f"renders the first {counted(num, 'message')} differently if others follow, so earlier turns cannot be masked"
        return UserError("the chat template", found, f"{REMEDY}, or --train_on last")
    found = "renders its generation prompt differently from the start of the answer, so the answer cannot be masked"
    return UserError("the chat template", found, REMEDY)


def _after_stop_token(tokenizer: Any, input_ids: list[int], start: int, texts: list[str]) -> int:
    """The end of the turn: after its stop token if only white space follows it, else the end of the turn's text.

    `texts`: of each token from `start` to the end of the turn's text.
    """
    for position in range(start + len(texts) - 1, start - 1, -1):
        if is_stop_token(tokenizer, input_ids[position]):
            return position + 1
        if texts[position - start].strip():
            break
    return start + len(texts)

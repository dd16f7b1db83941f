"""What ends a turn of the model and a response: the one place that knows these tokens."""

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from trainer.datasets.conversations.control_tokens import control_pattern, ids_behind, is_stop_token
from trainer.datasets.conversations.rendering import probed, render
from trainer.datasets.conversations.turns import MARK
from trainer.errors import UserError

ENDS_WITH_EOS = "answers_end_with_eos"  # in tokenizer_config.json of a reward model, see `scored_ends`
QUESTION = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TurnEnds:
    """How the last answer of a text begins and ends. A reward model was trained on texts that end in this way.

    For <user>x<assistant>y<end>\\n: opening is <assistant>, before is empty, end is <end>, and after is \\n.
    """

    opening: tuple[int, ...] = ()  # the generation prompt; empty without a chat template that shows it
    opening_text: str = ""
    before: tuple[int, ...] = ()  # between the answer and the token that ends the turn
    end: int | None = None  # the token that ends a turn; None if the template has none
    after: tuple[int, ...] = ()  # what the template adds after the last turn
    closing_text: str = ""  # the text of before, end and after
    before_text: str = ""
    closes: bool = False  # the end token stands in the text of a whole conversation (not so for GLM)

    def opens(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends with the generation prompt of the template."""
        return bool(self.opening) and tuple(prompt_ids[-len(self.opening) :]) == self.opening

    def opens_text(self, prompt: str) -> bool:
        """Whether the text of a prompt ends with the generation prompt of the template."""
        return bool(self.opening_text) and prompt.endswith(self.opening_text)

    def closed(self, response_ids: list[int]) -> list[int]:
        """The response with the template's end. `response_ids` are without the token that stopped them."""
        if not self.closes:
            return [*response_ids, *self.before]
        has_before = bool(self.before) and tuple(response_ids[-len(self.before) :]) == self.before
        return [*response_ids, *(() if has_before else self.before), self.end, *self.after]

    def without_end(self, text: str, eos: str | None) -> str:
        """A text without the template's end, or the eos, that it spells out."""
        for end in (self.closing_text.rstrip(), self.closing_text.strip(), eos):
            if end and text.rstrip().endswith(end):
                return text.rstrip().removesuffix(end)
        return text

    def closed_text(self, response: str) -> str:
        """The text of a finished response with the template's end."""
        has_before = self.closes and self.before_text and response.endswith(self.before_text)
        return response + self.closing_text.removeprefix(self.before_text if has_before else "")


def openings_of(tokenizer: Any) -> tuple[str, ...]:
    """What a rendered conversation begins with: bos, and what the chat template writes before a first message.

    <bos><user>x<end> has <bos>, <user> and <bos><user>. Empty without a template. A template may refuse a system text.
    Raises TooLarge as `turn_ends` does.
    """
    if not tokenizer.chat_template:
        return ()
    pattern, bos = control_pattern(tokenizer), tokenizer.bos_token or ""
    found = [bos]
    for messages in ([{**QUESTION, "content": MARK}], [{"role": "system", "content": MARK}, QUESTION]):
        text = probed(partial(render, tokenizer, messages, tokenize=False), None)
        if text is None:
            break
        before, mark, after = text.partition(MARK)
        if mark:
            tokens = pattern.findall(before) if pattern else []
            ends = pattern.findall(after)[:1] if pattern else []  # a system text of the template has one too
            found += [before, before.removeprefix(bos), *(token for token in tokens if token not in ends)]
    return tuple(sorted({text for text in found if text.strip()}))


def _around_answers(tokenizer: Any) -> tuple:
    """A question without and with the generation prompt, and what follows the last answer and an earlier one."""
    bare, asked = (render(tokenizer, [QUESTION], tokenize=False, add_generation_prompt=add) for add in (False, True))
    answered = [QUESTION, {"role": "assistant", "content": MARK}]
    return bare, asked, _after_mark(tokenizer, answered), _after_mark(tokenizer, [*answered, QUESTION])


def turn_ends(tokenizer: Any) -> TurnEnds:
    """How the tokenizer's chat template begins and ends an answer, found by rendering. Empty without a template.

    Raises TooLarge for a template that takes more time or memory than --limits allow.

    The token that ends a turn is the first special one after an answer that ends a conversation. GLM's template has
    none there: the mark of the next role ends its turns. If several stand together (Cohere), it is the last one that
    also follows an earlier answer.
    """
    if not tokenizer.chat_template:
        return TurnEnds()
    found = probed(lambda: _around_answers(tokenizer), None)
    if found is None:
        return TurnEnds()
    bare, asked, last, more = found
    opening_text = asked[len(bare) :] if asked.startswith(bare) else ""
    opening = tuple(tokenizer(opening_text, add_special_tokens=False)["input_ids"]) if opening_text else ()
    if last is None:
        return TurnEnds(opening, opening_text)
    ids, text = last
    first, run = _special_run(tokenizer, ids)
    following = _special_run(tokenizer, more[0])[1] if more else []
    if not run:
        return TurnEnds(opening, opening_text, tuple(ids), following[0] if following else None, (), text, text)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(run, following)))) or len(run)
    place = first + shared - 1
    return TurnEnds(
        opening,
        opening_text,
        before=tuple(ids[:place]),
        end=ids[place],
        after=tuple(ids[place + 1 :]),
        closing_text=text,
        before_text=text.partition(tokenizer.convert_ids_to_tokens(ids[place]))[0],
        closes=True,
    )


def trained_ends(tokenizer: Any) -> TurnEnds:
    """`turn_ends` for answers that are trained to end. Where the template has no end (GLM), only eos can: then it is empty.

    A reward model adds no such eos: it also reads conversations, which end as the template ends them.
    """
    ends = turn_ends(tokenizer)
    return ends if ends.closes else TurnEnds()


def scored_ends(tokenizer: Any) -> TurnEnds:
    """`turn_ends` as the reward model of this tokenizer reads answers.

    Where the template has no end (GLM), the answers that it was trained on may have spelled out eos. Then each has one.
    """
    ends = turn_ends(tokenizer)
    if ends.closes or not tokenizer.init_kwargs.get(ENDS_WITH_EOS):
        return ends
    closing = {"end": tokenizer.eos_token_id, "closing_text": tokenizer.eos_token, "closes": True}
    return replace(ends, before=(), before_text="", **closing)


def stop_ids(tokenizer: Any, folder: str) -> tuple[int, ...]:
    """The tokens that end a response: eos of the tokenizer, the end of the template's turns, and eos of the model folder.

    The folder's eos is that of generation_config.json, or of config.json without it. Raises UserError without any.
    """
    found = {tokenizer.eos_token_id, turn_ends(tokenizer).end, *_eos_of(folder)} - {None}
    if not found:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no response can end")
    return tuple(sorted(found))


def as_trained(
    prompt_ids: list[int], response_ids: list[int], ends: TurnEnds, stops: tuple[int, ...], eos: int | None
) -> list[int]:
    """The response as `train_rm` trained answers: a stop token is replaced by the end of the template, or by eos.

    A response without a stop token was cut, so it stays as it is.
    """
    if not response_ids or response_ids[-1] not in stops:
        return response_ids
    if ends.opens(prompt_ids) or (not ends.opening and response_ids[-1] == ends.end):
        return ends.closed(response_ids[:-1])
    return response_ids if eos is None else [*response_ids[:-1], eos]


def _after_mark(tokenizer: Any, messages: list[dict]) -> tuple[list[int], str] | None:
    """The ids and the text after MARK, or None if the template does not show it."""
    text = render(tokenizer, messages, tokenize=False)
    if MARK not in text:
        return None
    return ids_behind(tokenizer, text, MARK), text[text.rindex(MARK) + len(MARK) :]


def _special_run(tokenizer: Any, ids: list[int]) -> tuple[int, list[int]]:
    """The place of the first special token, and the special tokens that stand there together."""
    first = next((i for i, token in enumerate(ids) if is_stop_token(tokenizer, token)), len(ids))
    return first, list(takewhile(lambda token: is_stop_token(tokenizer, token), ids[first:]))


def _eos_of(folder: str) -> set[int]:
    for name in ("generation_config.json", "config.json"):
        path = Path(folder, name)
        config = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for part in (config, config.get("text_config") or {}):
            eos = part.get("eos_token_id")
            if eos is None:
                continue
            found = eos if isinstance(eos, list) else [eos]
            if not all(type(one) is int for one in found):
                raise UserError(str(path), f"eos_token_id {str(eos)[:40]}", "a number, or a list of numbers")
            return set(found)
    return set()

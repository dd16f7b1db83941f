"""Token ids of texts without a chat template, with the loss mask of their answers; and what identifies token ids."""

import hashlib
import json
from typing import Any

import numpy as np
import transformers

from trainer.datasets.conversations.control_tokens import (
    broken,
    broken_document,
    check_end,
    encode,
    first_behind,
    is_stop_token,
    notes_of_end,
)
from trainer.datasets.conversations.turn_ends import TurnEnds

# Raise this number if the same rows and options would give other tokens: an older cache file must not be used.
TOKENIZER_VERSION = 18
NO_TURN = TurnEnds()
TURN_IS_OPEN = "answers to prompts that open a turn of the assistant end as the chat template ends it"
SET_BY_FLAGS = ("template_args", "reads_control_tokens")  # attributes of a tokenizer; see `prepare_tokenizer`


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """Everything that decides the tokenizer's output, as JSON values."""
    state: dict[str, Any] = {
        "transformers": transformers.__version__,
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    state |= {name: getattr(tokenizer, name) for name in SET_BY_FLAGS if hasattr(tokenizer, name)}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # The last call of the tokenizer left truncation and padding here. Every call sets them again.
        return state | {"backend": {k: v for k, v in backend.items() if k not in ("truncation", "padding")}}
    return state | {"vocab": sorted(tokenizer.get_vocab().items())}


def digest_of(input_ids: list[int]) -> str:
    """A hash of token ids, as 16 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(input_ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()


def prompt_tokens(tokenizer: Any, prompt: str, input_template: str | None = None) -> list[int]:
    """The ids of a text that continues: with the tokenizer's opening tokens, without the eos it may add at the end.

    The text is first put into `input_template`.
    """
    text = _framed(tokenizer, prompt, input_template)
    input_ids, offsets = encode(tokenizer, text, opens=True)
    check_end(tokenizer, text, offsets)
    return input_ids


def prompt_and_answer(
    tokenizer: Any, prompt: str, answer: str, input_template: str | None, ends: TurnEnds = NO_TURN
) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of prompt, answer and eos, with loss on the answer and eos.

    A prompt of 3 tokens and an answer of 2 give the mask [0, 0, 0, 1, 1, 1]. An empty answer has no loss: it would
    teach only to stop. Both are tokenized as one text: SentencePiece would begin a text of its own with a space. A
    token that reaches over the border is the answer's. A bos that the answer spells out behind a prompt is text.

    A prompt that ends with the opening of `ends` has opened a turn. Its answer gets the template's end in place of eos.
    What follows the token that ends a turn has no loss.
    """
    framed, trained = _framed(tokenizer, prompt, input_template), int(bool(answer.strip()))
    text = framed + broken_document(tokenizer, answer, opens=not framed)
    is_turn = ends.opens_text(framed)
    if is_turn:
        text = _closed(tokenizer, text, ends)
    if tokenizer.is_fast:
        input_ids, offsets = encode(tokenizer, text, opens=True)
        start = first_behind(offsets, len(framed))
    else:
        input_ids = encode(tokenizer, framed, opens=True)[0]
        start = len(input_ids)
        input_ids += encode(tokenizer, text[len(framed) :])[0]
    input_ids = input_ids if is_turn else _with_eos(tokenizer, input_ids, start)
    num_after = len(ends.after) if is_turn else 0
    return input_ids, [0] * start + [trained] * (len(input_ids) - start - num_after) + [0] * num_after


def notes_of_prompt(tokenizer: Any, prompt: str, input_template: str | None, ends: TurnEnds = NO_TURN) -> set[str]:
    """The notes of a prompt of `prompt_and_answer`.

    They say how its answers end if it has opened a turn, and warn if its end is lost where it is tokenized alone.
    """
    framed = _framed(tokenizer, prompt, input_template)
    return notes_of_end(tokenizer, framed, opens=True) | ({TURN_IS_OPEN} if ends.opens_text(framed) else set())


def trains_stop(tokenizer: Any, input_ids: list[int], loss_mask: list[int]) -> bool:
    """Whether a run of tokens with a loss ends with a stop token. [0, 1, 1, 0, 1] has two runs."""
    after = [*loss_mask[1:], 0]
    return any(has and not after[i] and is_stop_token(tokenizer, input_ids[i]) for i, has in enumerate(loss_mask))


def whole_text(tokenizer: Any, text: str, ends: TurnEnds = NO_TURN) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of a text and eos, with loss on all tokens. An empty text has no loss.

    A text with the opening of `ends` has turns. It gets the template's end in place of eos.
    """
    document = broken_document(tokenizer, text)
    is_turn = bool(ends.opening_text) and ends.opening_text in document
    document = _closed(tokenizer, document, ends) if is_turn else document
    input_ids = encode(tokenizer, document, opens=True)[0]
    input_ids = input_ids if is_turn else _with_eos(tokenizer, input_ids)
    return input_ids, [1 if text.strip() else 0] * len(input_ids)


def _framed(tokenizer: Any, prompt: str, input_template: str | None) -> str:
    """The prompt inside the template, whose control tokens are real. Those of the prompt are broken, but for its bos."""
    if input_template is None:
        bos = tokenizer.bos_token if tokenizer.bos_token and prompt.startswith(tokenizer.bos_token) else ""
        return bos + broken(tokenizer, prompt[len(bos) :])
    return input_template.replace("{}", broken(tokenizer, prompt), 1)  # not str.format: the texts may hold braces


def _closed(tokenizer: Any, text: str, ends: TurnEnds) -> str:
    """A text that ends with an answer, with the template's end. An end or eos that stands there is enough."""
    if not ends.closes and text.rstrip().endswith(tokenizer.eos_token):
        return text.rstrip()  # nothing takes the place of its eos
    return ends.without_end(text, tokenizer.eos_token) + ends.closing_text


def _with_eos(tokenizer: Any, input_ids: list[int], start: int = 0) -> list[int]:
    """The ids with eos at their end. One that stands there, at `start` or later, is enough."""
    eos = tokenizer.eos_token_id
    return input_ids if input_ids[start:] and input_ids[-1] == eos else [*input_ids, eos]

"""Token ids of texts without a chat template, with the loss mask of their answers; and what identifies token ids."""

import hashlib
import json
from typing import Any

import numpy as np
import transformers

from trainer.errors import UserError


def tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """Everything that decides the tokenizer's output, as JSON values."""
    state: dict[str, Any] = {
        "transformers": transformers.__version__,
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # The last call of the tokenizer left truncation and padding here. Every call sets them again.
        return state | {"backend": {k: v for k, v in backend.items() if k not in ("truncation", "padding")}}
    return state | {"vocab": sorted(tokenizer.get_vocab().items())}


def digest_of(input_ids: list[int]) -> str:
    """A hash of token ids, as 16 hexadecimal digits."""
    return hashlib.blake2b(np.asarray(input_ids, dtype="<i4").tobytes(), digest_size=8).hexdigest()


def is_stop_token(tokenizer: Any, token: int) -> bool:
    """Whether a token ends a turn or a text: the eos token or any special token of the vocabulary."""
    if token in tokenizer.all_special_ids:
        return True
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and added.special


def check_input_template(input_template: str | None) -> None:
    """Check that --input_template has one {} for the text. Raises UserError otherwise."""
    if input_template is not None and input_template.count("{}") != 1:
        raise UserError("--input_template", f"{input_template.count('{}')} times {{}}", "exactly one {}")


def prompt_tokens(tokenizer: Any, prompt: str, input_template: str | None = None) -> list[int]:
    """The ids of a text that continues: with the tokenizer's opening tokens, without the eos it may add at the end.

    The text is first put into `input_template`.
    """
    if input_template is not None:
        prompt = input_template.replace("{}", prompt, 1)  # not str.format: the texts may hold braces
    input_ids = list(tokenizer(prompt)["input_ids"])
    eos = tokenizer.eos_token_id
    if input_ids and input_ids[-1] == eos and tokenizer("a")["input_ids"][-1] == eos:
        input_ids.pop()
    return input_ids


def prompt_and_answer(
    tokenizer: Any, prompt: str, answer: str, input_template: str | None
) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of prompt, answer and eos, with loss on the answer and eos.

    A prompt of 3 tokens and an answer of 2 give the mask [0, 0, 0, 1, 1, 1]. An empty answer has no loss: it would
    teach only to stop.
    """
    prompt_ids = prompt_tokens(tokenizer, prompt, input_template)
    answer_ids = _with_eos(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
    return prompt_ids + answer_ids, [0] * len(prompt_ids) + [1 if answer.strip() else 0] * len(answer_ids)


def whole_text(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of a text and eos, with loss on all tokens. An empty text has no loss."""
    input_ids = _with_eos(tokenizer, prompt_tokens(tokenizer, text))
    return input_ids, [1 if text.strip() else 0] * len(input_ids)


def _with_eos(tokenizer: Any, input_ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return list(input_ids) if input_ids and input_ids[-1] == eos else [*input_ids, eos]

"""Turn a prompt and an answer into tokens, and collate micro-batches. Paired and unpaired preferences share this."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.datasets.conversations.messages import as_messages, tools_of
from trainer.datasets.conversations.templates import chat_template, render_chat
from trainer.datasets.conversations.tokens import check_input_template, prompt_and_answer, whole_text
from trainer.datasets.rows import text_of
from trainer.datasets.samples.ledger import Ledger, control_note, keep
from trainer.errors import UserError
from trainer.flags.data_rules import refuse_for_rows

# what becomes of a row, in its column `fate`; only rows with "kept" are trained
KEPT, IDENTICAL, EMPTY, CUT_AWAY = "kept", "identical", "empty", "cut away"


@dataclass(frozen=True)
class AnswerOptions:
    """Everything that decides, together with the tokenizer, the tokens of the answers of a row."""

    chat: bool
    prompt_key: str | None
    answer_keys: tuple[str, ...]
    input_template: str | None
    max_len: int

    @property
    def prompt_columns(self) -> list[str]:
        """The columns before the answer, for images."""
        return [self.prompt_key] if self.prompt_key else []

    @property
    def answer_columns(self) -> list[str]:
        """The columns of answers, for images. Each one ends a separate conversation."""
        return list(self.answer_keys)


def answer_options(
    rows: Dataset,
    tokenizer: Any,
    prompt_key: str | None,
    answer_keys: tuple[str, ...],
    input_template: str | None,
    apply_chat_template: bool,
    max_len: int,
) -> AnswerOptions:
    """Make the options for rows whose keys exist. If prompt_key is None, a column `prompt` is used if there is one.

    Raises: UserError for a tokenizer without eos or chat template, and for an input_template that cannot be used.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no answer could end")
    if prompt_key is None and "prompt" in rows.column_names:
        prompt_key = "prompt"
    is_list = any(isinstance(rows[0][key], list) for key in (prompt_key, *answer_keys) if key)
    options = AnswerOptions(apply_chat_template or is_list, prompt_key, answer_keys, input_template, max_len)
    if options.chat:
        chat_template(tokenizer)  # raises if there is none
    facts = {"has_conversations": options.chat, "has_prompts": prompt_key is not None}
    refuse_for_rows(apply_chat_template=apply_chat_template, input_template=input_template, **facts)
    check_input_template(input_template)
    return options


def tokenize_answer(
    row: Any, key_flag: str, key: str, tokenizer: Any, options: AnswerOptions
) -> tuple[list[int], list[int]]:
    """Tokenize the prompt and the answer under `key` to (input_ids, loss_mask), without a cut to max_len.

    An empty answer has no loss token. The first token is never a target, because nothing predicts it.
    """
    input_ids, mask = (_chat_answer if options.chat else _text_answer)(row, key_flag, key, tokenizer, options)
    return input_ids, [0, *mask[1:]]


def _text_answer(row: Any, key_flag: str, key: str, tokenizer: Any, options: AnswerOptions):
    answer = text_of(row, key_flag, key)
    if options.prompt_key is None:  # whole texts: the part that both share cancels in every preference
        return whole_text(tokenizer, answer)
    prompt = text_of(row, "--prompt_key", options.prompt_key)
    return prompt_and_answer(tokenizer, prompt, answer, options.input_template)


def _chat_answer(row: Any, key_flag: str, key: str, tokenizer: Any, options: AnswerOptions):
    prompt = [] if options.prompt_key is None else as_messages(row, "--prompt_key", options.prompt_key, "user")
    messages, tools = prompt + as_messages(row, key_flag, key, "assistant"), tools_of(row)
    if not messages or messages[-1]["role"] != "assistant":
        raise UserError(f"{key_flag} {key}", "does not end with an assistant message", "an answer")
    if not messages[-1]["content"].strip() and not messages[-1].get("tool_calls"):
        # an empty answer has no loss token: an earlier turn must not be trained instead
        return render_chat(tokenizer, messages[:-1], multiturn=False, tools=tools)[0], []
    return render_chat(tokenizer, messages, multiturn=False, tools=tools)


def keep_answers(
    samples: Dataset, noun: str, sentence: str, fates: list[str], totals: dict[str, str], *, flag: str, max_len: int
) -> tuple[Dataset, Ledger]:
    """The samples whose fate is KEPT, and the ledger. Raises UserError if no `noun` is left.

    `fates` are counted: "cut away" as num_cut_away. `totals` are sums over the kept samples: name of a count -> column.
    """
    facts = samples.with_format("numpy").select_columns(["fate", "truncated", *totals.values()])[:]
    kept, all_fates = facts["fate"] == KEPT, list(facts["fate"])
    ledger = Ledger(
        {
            "num_rows": len(samples),
            **{f"num_{fate.replace(' ', '_')}": all_fates.count(fate) for fate in fates},
            "num_truncated": int(facts["truncated"].sum()),  # rows that --max_len cut, kept or not
            "num_samples": int(kept.sum()),
            **{name: int(facts[column][kept].sum()) for name, column in totals.items()},
        },
        sentence + control_note(samples),
    )
    if not kept.any():
        raise UserError(flag, f"no {noun} is left ({ledger.summary()})", f"answers that fit into --max_len {max_len}")
    return keep(samples.remove_columns(["fate", "truncated", "control_tokens"]), kept), ledger


def scored_position(input_ids: list[int], pad_token_id: int) -> int:
    """The position where a reward model scores a sequence: its last token that is not the pad token.

    The classifiers of transformers use the same position. If eos is the pad token, this is the token before eos.
    """
    return max((i for i, token in enumerate(input_ids) if token != pad_token_id), default=len(input_ids) - 1)


def collate_sequences(
    sequences: list[dict], pad_token_id: int, packed: bool, collate: Callable | None = None
) -> dict[str, torch.Tensor]:
    """Collate sequences (input_ids, loss_mask) into a micro-batch for one forward pass, padded or packed.

    To the result of `trainer.datasets.batches.packing` it adds three tensors per token, each (rows, tokens):
    - sequence_ids: the number of the token's sequence.
    - is_token: 1 for a token, 0 for padding.
    - is_last: 1 where a sequence is scored (see `scored_position`).
    Packed sequences of 3 and 2 tokens give sequence_ids [[0, 0, 0, 1, 1]] and is_last [[0, 0, 1, 0, 1]]. They stay
    correct after sharding over sp ranks, and so do sums per sequence.
    An empty list gives one token without target, with is_token and is_last 0. `collate` may replace the two functions
    of `trainer.datasets.batches.packing`. A sequence that it adds at the end counts as padding.
    """
    collate = collate or (collate_packed if packed else collate_padded)
    batch = collate(sequences, pad_token_id=pad_token_id)
    for name in ("sequence_ids", "is_token", "is_last"):
        batch[name] = torch.zeros_like(batch["input_ids"])
    start = 0
    for number, sequence in enumerate(sequences):
        input_ids = sequence["input_ids"]
        length = len(input_ids)
        row, first = (0, start) if packed else (number, 0)
        start += length
        batch["sequence_ids"][row, first : first + length] = number
        batch["is_token"][row, first : first + length] = 1
        batch["is_last"][row, first + scored_position(input_ids, pad_token_id)] = 1
    return batch

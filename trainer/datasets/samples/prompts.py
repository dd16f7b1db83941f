"""Turn rows into prompts for reinforcement learning: token ids, a label for the reward, and a ledger of the rows."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets

from trainer.datasets.conversations.control_tokens import holds_controls
from trainer.datasets.conversations.messages import as_messages, tools_of
from trainer.datasets.conversations.templates import chat_template, render_prompt
from trainer.datasets.conversations.tokens import (
    TOKENIZER_VERSION,
    check_input_template,
    digest_of,
    prompt_tokens,
    tokenizer_state,
)
from trainer.datasets.library import map_cached
from trainer.datasets.rows import check_keys, text_of, within
from trainer.datasets.samples.ledger import Ledger, control_note, keep
from trainer.errors import UserError
from trainer.flags.data_rules import refuse_for_rows

COLUMN = "column "  # before the name of a column that is kept for rewards
SENTENCE = (
    "{num_rows} rows: {num_samples} prompts, excluded {num_too_long} longer than --prompt_max_len "
    "and {num_empty} empty; {num_tokens} tokens"
)


@dataclass(frozen=True)
class _Options:
    """Everything that decides, together with the tokenizer, what a row becomes."""

    chat: bool
    input_key: str
    label_key: str | None
    input_template: str | None

    @property
    def prompt_columns(self) -> list[str]:
        """The columns before the answer, for images."""
        return [self.input_key]

    @property
    def answer_columns(self) -> list[str]:
        """The columns of answers, for images. Each one ends a separate conversation."""
        return []


def tokenize_prompts(
    rows: Dataset,
    tokenizer: Any,
    *,
    flag: str,
    input_key: str | None,
    label_key: str | None,
    input_template: str | None,
    apply_chat_template: bool,
    max_len: int,
    num_proc: int | None = None,
    needs_labels: bool = False,
    map_rows: Callable = map_cached,
) -> tuple[Dataset, Ledger]:
    """Return prompts in row order, and the ledger. They are cached on disk by rows, tokenizer and options.

    The prompt is a text (put into input_template) or a list of messages. Messages, or apply_chat_template, select the
    chat template with its generation prompt. Prompts longer than max_len tokens and empty prompts are left out.
    Columns: prompt_ids (int32), label (text; None without label_key), num_tokens, digest, row (index into `rows`).

    Raises: UserError for missing keys and values of another kind (with the row, counted from 1). With `needs_labels`,
    also for a prompt that is kept and has no label.
    """
    key = input_key or "messages"
    check_keys(rows.column_names, flag, {"--input_key": key, "--label_key": label_key})
    options = _Options(apply_chat_template or isinstance(rows[0][key], list), key, label_key, input_template)
    if options.chat:
        chat_template(tokenizer)  # raises if there is none
    refuse_for_rows(
        apply_chat_template=apply_chat_template, input_template=input_template, has_conversations=options.chat
    )
    check_input_template(input_template)
    prompts = map_rows(
        rows,
        _tokenize_row,
        folder="trainer_prompts",
        key=[TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options)],
        features=_features(),
        num_proc=num_proc,
        tokenizer=tokenizer,
        options=options,
        flag=flag,
    )
    lengths = np.asarray(prompts["num_tokens"])
    kept = (lengths > 0) & (lengths <= max_len)
    counts = {
        "num_rows": len(rows),
        "num_too_long": int((lengths > max_len).sum()),  # left out, because a cut prompt would ask something else
        "num_empty": int((lengths == 0).sum()),
        "num_samples": int(kept.sum()),
        "num_tokens": int(lengths[kept].sum()),
    }
    ledger = Ledger(counts, SENTENCE + control_note(prompts))
    if not kept.any():
        raise UserError(flag, f"no prompt is left ({ledger.summary()})", f"prompts of up to {max_len} tokens")
    prompts = keep(prompts.remove_columns("control_tokens"), kept)
    if needs_labels:
        for row, label in zip(prompts["row"], prompts["label"]):
            if not (label or "").strip():
                found = "no value" if label is None else "an empty text"
                raise UserError(f"{flag} row {row + 1}: --label_key {label_key}", found, "an answer to compare with")
    return prompts, ledger


def with_columns(prompts: Dataset, rows: Dataset, names: list[str]) -> Dataset:
    """Add the columns `names` of `rows` to their prompts, for `columns_of`."""
    if not names:
        return prompts
    columns = rows.select_columns(names).select(prompts["row"])
    return concatenate_datasets([prompts, columns.rename_columns({name: COLUMN + name for name in names})], axis=1)


def columns_of(prompt: dict[str, Any]) -> dict[str, Any]:
    """The columns of the dataset that `with_columns` added to a prompt."""
    return {name.removeprefix(COLUMN): value for name, value in prompt.items() if name.startswith(COLUMN)}


def _features() -> Features:
    numbers = {name: Value("int64") for name in ("num_tokens", "row")}
    texts = {name: Value("string") for name in ("label", "digest")}
    return Features({"prompt_ids": List(Value("int32")), **numbers, **texts, "control_tokens": Value("bool")})


def _tokenize_row(row: Any, index: int, *, tokenizer: Any, options: _Options, flag: str) -> dict[str, Any]:
    with within(f"{flag} row {index + 1}"):
        prompt_ids = (_chat_prompt if options.chat else _text_prompt)(row, tokenizer, options)
    label = row[options.label_key] if options.label_key else None
    return {
        "prompt_ids": prompt_ids,
        "label": label if label is None or isinstance(label, str) else json.dumps(label),
        "num_tokens": len(prompt_ids),
        "digest": digest_of(prompt_ids),
        "row": index,
        "control_tokens": holds_controls(tokenizer, row[options.input_key]),
    }


def _text_prompt(row: Any, tokenizer: Any, options: _Options) -> list[int]:
    prompt = text_of(row, "--input_key", options.input_key)
    return prompt_tokens(tokenizer, prompt, options.input_template) if prompt.strip() else []


def _chat_prompt(row: Any, tokenizer: Any, options: _Options) -> list[int]:
    messages = as_messages(row, "--input_key", options.input_key, "user")
    if not any(message["content"].strip() for message in messages):
        return []
    if messages[-1]["role"] == "assistant":
        found = "ends with an assistant message"
        raise UserError(f"--input_key {options.input_key}", found, "a prompt that the model answers")
    return render_prompt(tokenizer, messages, tools_of(row))


def render_prompt_text(prompt: dict[str, Any], tokenizer: Any) -> str:
    """Show a prompt as the model sees it, and its label."""
    return f"{tokenizer.decode(prompt['prompt_ids'])!r}, label {prompt['label']!r}"

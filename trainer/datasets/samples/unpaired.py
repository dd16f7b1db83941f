"""Turn rows of single answers, each good or bad, into token samples and micro-batches for KTO, with a ledger."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, Features, List, Value

from trainer.comma_separated import names_in
from trainer.datasets.conversations.control_tokens import holds_controls
from trainer.datasets.conversations.lost_characters import note_lost
from trainer.datasets.conversations.messages import IGNORE
from trainer.datasets.conversations.tokens import TOKENIZER_VERSION, digest_of, tokenizer_state
from trainer.datasets.library import map_cached, quiet
from trainer.datasets.rows import check_keys, column_of_key, lookup, truth_value, within
from trainer.datasets.samples.answers import (
    CUT_AWAY,
    EMPTY,
    KEPT,
    AnswerOptions,
    answer_options,
    collate_sequences,
    keep_answers,
    tokenize_answer,
)
from trainer.datasets.samples.ledger import Ledger
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.sets import Sets, tokens_of
from trainer.datasets.samples.sft_samples import render_sample
from trainer.datasets.shapes.columns import ANSWERS, CONVERSATIONS, LABELS, MORE_ANSWERS
from trainer.datasets.shapes.notes import NOTE
from trainer.datasets.shapes.row_reader import ANSWER
from trainer.datasets.shapes.row_refusals import refuse_other_sets
from trainer.errors import UserError

SENTENCE = (
    "{num_rows} rows: {num_samples} answers, {num_desirable} of them desirable, excluded "
    "{num_empty} empty ones and {num_cut_away} cut away by --max_len; "
    "{num_truncated} truncated; {num_tokens} tokens"
)


def unpair(rows: Dataset, chosen_key: str, rejected_key: str, completion_key: str, label_key: str) -> Dataset:
    """Turn each pair into two rows: the chosen answer (label true), then the rejected answer (label false)."""

    def two_rows(batch: dict) -> dict:
        pairs = list(zip(batch[chosen_key], batch[rejected_key]))
        others = {name: values for name, values in batch.items() if name not in (chosen_key, rejected_key)}
        twice = {name: [value for value in values for _ in range(2)] for name, values in others.items()}
        labels = [True, False] * len(pairs)
        return {**twice, completion_key: [side for pair in pairs for side in pair], label_key: labels}

    with quiet():
        return rows.map(two_rows, batched=True, remove_columns=rows.column_names)


def tokenize_unpaired(
    rows: Dataset | Sets, tokenizer: Any, *, flag: str, max_len: int, part: Part = WHOLE, **flags: Any
) -> tuple[Dataset, Ledger]:
    """Return answers in row order, and the ledger. They are cached on disk by rows, tokenizer and options.
    Both are those of `part`. `flags` go to `answer_tokens`.

    Prompt and answer become tokens as in `tokenize_preference`. Columns: input_ids (int32), loss_mask (int8), start (of
    the answer in input_ids), label (bool), num_tokens, num_loss_tokens (1: the loss is a mean over answers), digest,
    row (index into `rows`).

    Raises: UserError for missing keys and values of another kind (with the row, counted from 1).
    """
    samples = tokens_of(rows, answer_tokens, tokenizer, flag=flag, max_len=max_len, **flags)
    totals = {"num_desirable": "label", "num_tokens": "num_tokens"}
    return keep_answers(part.of(samples), "answer", SENTENCE, [EMPTY, CUT_AWAY], totals, flag=flag, max_len=max_len)


def answer_tokens(
    rows: Dataset,
    tokenizer: Any,
    *,
    flag: str,
    prompt_key: str | None,
    completion_key: str,
    label_key: str,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    input_template: str | None,
    apply_chat_template: bool,
    max_len: int,
    num_proc: int | None = None,
    ignore_columns: str | None = None,
    system: str | None = None,
    map_rows: Callable = map_cached,
) -> Dataset:
    """The tokens of every row of one set, also of those that are not trained: see `tokenize_unpaired`.

    Rows with pairs and without a column of single answers become two answers each.
    """
    is_pairs = completion_key not in rows.column_names and {chosen_key, rejected_key} <= set(rows.column_names)
    if is_pairs:
        _refuse_own_labels(rows, label_key, ignore_columns, flag)
        rows = unpair(rows, chosen_key, rejected_key, completion_key, label_key)
    columns = rows.column_names
    if label_key == "label" and label_key not in columns and "kto_tag" in columns:
        label_key = "kto_tag"  # LLaMA-Factory
    keys = {"--prompt_key": prompt_key, "--completion_key": completion_key}
    known = completion_key == "completion" and any(
        name in columns for name in (*ANSWERS, *MORE_ANSWERS, *CONVERSATIONS)
    )
    if not known and not column_of_key(columns, completion_key):
        refuse_other_sets(columns, flag)
    check_keys(columns, flag, {**({} if known else keys), "--prompt_key": prompt_key, "--label_key": label_key})
    reading = {"ignored": ignore_columns, "system": system, "taken": (label_key,)}
    options = answer_options(
        rows, tokenizer, ANSWER, keys, ("completion",), input_template, apply_chat_template, max_len, **reading
    )
    return map_rows(
        rows,
        _tokenize_row,
        folder="trainer_unpaired",
        key=[TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options), label_key, is_pairs],
        features=_features(),
        num_proc=num_proc,
        tokenizer=tokenizer,
        options=options,
        label_key=label_key,
        flag=flag,
        num_answers=1 + is_pairs,
        source={completion_key: f"{chosen_key} and {rejected_key}"} if is_pairs else {},
    )


def _refuse_own_labels(rows: Dataset, label_key: str, ignored: str | None, flag: str) -> None:
    """Raise UserError for a column of labels in rows of pairs, whose answers have the labels true and false."""
    for name in {label_key, *LABELS} & set(rows.column_names) - set(names_in(ignored)):
        if any(value is not None for value in rows[name]):
            found = "a label of its own, and pairs are labelled by which answer is chosen"
            raise UserError(f"{flag} column {name}", found, f"{IGNORE} {name}")


def _features() -> Features:
    numbers = {name: Value("int64") for name in ("start", "num_tokens", "num_loss_tokens", "row")}
    tokens = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))}
    flags = {name: Value("bool") for name in ("label", "truncated", "control_tokens")}
    texts = {name: Value("string") for name in ("digest", "fate", NOTE)}
    return Features({**tokens, **numbers, **flags, **texts})


def _tokenize_row(
    row: Any,
    index: int,
    *,
    tokenizer: Any,
    options: AnswerOptions,
    label_key: str,
    flag: str,
    num_answers: int,
    source: dict[str, str],
) -> dict[str, Any]:
    """`source`: the columns of a pair from which a column was made."""
    index //= num_answers
    with within(f"{flag} row {index + 1}"):
        row = options.reader.read(row)
        found = lookup(row.columns, label_key)
        label = truth_value(found)
        ids, mask = tokenize_answer(row, "completion", tokenizer, options)
        if label is None:
            raise UserError(f"--label_key {label_key}", repr(found), "true or false, 1 or 0")
    for made, columns in source.items():
        row.notes.shape = row.notes.shape.replace(f"{made} -> ", f"{columns} -> ")
    note_lost(row.notes, tokenizer, row.data(), ids)
    cut, cut_mask = ids[: options.max_len], mask[: options.max_len]
    fate = KEPT if any(cut_mask) else CUT_AWAY if any(mask) else EMPTY
    return {
        "input_ids": cut,
        "loss_mask": cut_mask,
        "start": cut_mask.index(1) if fate == KEPT else len(cut),
        "label": label,
        "num_tokens": len(cut),
        "num_loss_tokens": 1,
        "row": index,
        "digest": digest_of(cut),
        "truncated": len(ids) > options.max_len,
        "fate": fate,
        "control_tokens": holds_controls(tokenizer, *row.texts()),
        NOTE: row.notes.as_text(),
    }


def mismatched(sample: dict, max_len: int) -> dict:
    """Join the prompt of `sample` and the answer of `sample["previous"]`, cut to max_len tokens.

    Prompt [1, 2] with answer [3], and the previous prompt [4] with answer [5, 6], give [1, 2, 5, 6].
    """
    previous, parts = sample["previous"], dict(sample)
    for name in ("input_ids", "loss_mask"):
        parts[name] = (list(sample[name][: sample["start"]]) + list(previous[name][previous["start"] :]))[:max_len]
    parts["loss_mask"][0] = 0  # without a prompt, nothing predicts the first token
    return parts


def collate_unpaired(
    samples: list[dict], pad_token_id: int, packed: bool, max_len: int, collate: Callable | None = None
) -> dict:
    """Collate n answers into a micro-batch for one forward pass (see `collate_sequences`), padded or packed.

    Per answer (n,): desirable, 1 or 0. "mismatched" is a separate micro-batch: each prompt with the answer of the
    sample before it in the global batch. Each sample has that sample as `previous`.
    """
    batch: dict = collate_sequences(samples, pad_token_id, packed, collate)
    batch["desirable"] = torch.tensor([float(sample["label"]) for sample in samples])
    others = [mismatched(sample, max_len) for sample in samples]
    batch["mismatched"] = {**collate_sequences(others, pad_token_id, packed, collate), "num_sequences": len(samples)}
    return batch


def render_answer(sample: dict[str, Any], tokenizer: Any) -> str:
    """Decode one answer, with the loss tokens in [[ ]]."""
    return f"{'desirable' if sample['label'] else 'undesirable'}: {render_sample(sample, tokenizer)}"

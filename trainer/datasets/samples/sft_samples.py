"""Turn rows into token samples for supervised fine-tuning: ids, a target mask, and a ledger of the rows."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value

from trainer.datasets.batches.global_batches import column_of
from trainer.datasets.conversations.control_tokens import holds_controls
from trainer.datasets.conversations.lost_characters import note_lost
from trainer.datasets.conversations.messages import tools_of
from trainer.datasets.conversations.rendering import chat_template
from trainer.datasets.conversations.templates import arguments_of_row, notes_of_template, render_chat
from trainer.datasets.conversations.tokens import (
    NO_TURN,
    TOKENIZER_VERSION,
    digest_of,
    notes_of_prompt,
    prompt_and_answer,
    tokenizer_state,
    trains_stop,
    whole_text,
)
from trainer.datasets.conversations.turn_ends import TurnEnds, openings_of, trained_ends
from trainer.datasets.files.image_files import COLUMN
from trainer.datasets.library import map_cached
from trainer.datasets.rows import check_keys, within
from trainer.datasets.samples.ledger import Ledger, keep, ledger_of
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.prepared import checked, is_prepared
from trainer.datasets.samples.sets import Sets, tokens_of
from trainer.datasets.samples.stops import check_stops
from trainer.datasets.shapes.columns import BEFORE_ANSWER, CONVERSATIONS, MORE, PROMPTS, TEMPLATE_ARGS
from trainer.datasets.shapes.notes import NOTE
from trainer.datasets.shapes.prompt_part import flag_of_inner
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_reader import SFT, RowReader, reader_of
from trainer.datasets.shapes.row_refusals import needed, refuse_other_sets
from trainer.datasets.text_flags import check_input_template
from trainer.errors import UserError
from trainer.flags.data_rules import refuse_for_rows
from trainer.metrics import counted

FLAGS = ("truncated", "empty", "stop_trained", "control_tokens")
LEDGER_COLUMNS = (*FLAGS, NOTE)  # the others belong to a sample
SENTENCE = (
    "{num_rows:row}: {num_samples:sample}, {num_excluded} excluded (no loss token), {num_truncated} truncated; "
    "{num_tokens:token}, {num_loss_tokens} with loss; stop token trained in {num_stop_trained} of {num_samples}"
)


@dataclass(frozen=True)
class _Options:
    """Everything that decides, together with the tokenizer, what a row becomes."""

    reader: RowReader
    input_template: str | None
    train_on: str  # last or all
    max_len: int
    ends: TurnEnds = NO_TURN  # of answers to prompts that are rendered already
    answers = ("answer",)  # the parts of a row that are an answer, for images


def tokenize_sft(
    rows: Dataset | Sets,
    tokenizer: Any,
    *,
    flag: str,
    max_len: int,
    part: Part = WHOLE,
    allow_no_stop: bool = False,
    **flags: Any,
) -> tuple[Dataset, Ledger]:
    """Return token samples in row order, and the ledger. They are cached on disk by rows, tokenizer and options.

    `flags` go to `tokenize_rows`. Rows that `prepare_data` has tokenized are used unchanged. Samples without a loss token
    are left out and counted. The ledger is that of `part`.

    Columns: input_ids (int32), loss_mask (int8; 1 where the token is a target, never at position 0), num_tokens,
    num_loss_tokens, digest (of input_ids only), row (index into `rows`). `flag` names the dataset in errors.
    Raises: UserError for missing keys, and for values that are not texts (with the row, counted from 1). Also if the
    template ends no answer with a stop token, unless `allow_no_stop` or `part` is for evaluation.
    """
    samples = tokens_of(rows, _tokens, tokenizer, flag=flag, max_len=max_len, **flags)
    only_warns = allow_no_stop or part.is_evaluation
    samples, ledger = with_loss(part.of(samples), flag, max_len, only_warns, rows.column_names)
    ledger.left_out = None if is_prepared(rows) else ledger.left_out  # prepare_data has said so
    return samples, ledger


def _tokens(
    rows: Dataset,
    tokenizer: Any,
    *,
    flag: str,
    num_proc: int | None = None,
    map_rows: Callable = map_cached,
    allow_no_stop: bool = False,  # not used here: `with_loss` asks it of all sets together
    **flags: Any,
) -> Dataset:
    if is_prepared(rows):
        return checked(rows, tokenizer, flag, flags, set(sft_features()))
    return tokenize_rows(rows, tokenizer, flag=flag, num_proc=num_proc, map_rows=map_rows, **flags)


def tokenize_rows(
    rows: Dataset,
    tokenizer: Any,
    *,
    flag: str,
    num_proc: int | None = None,
    first_row: int = 0,
    map_rows: Callable = map_cached,
    **flags: Any,
) -> Dataset:
    """Return the tokens of every row, also of those without a loss token. `first_row` is the index of the first row.

    The row's shape decides, and flags override it: see `RowReader`. Texts: the prompt (put into input_template), the
    answer, eos, with loss after the prompt. Conversations: the chat template, with loss on its assistant tokens.
    pretrain_mode, and rows with nothing but a text: the text and eos, with loss on all tokens.
    Samples over max_len tokens are cut on the right, without eos.
    """
    options = options_of(rows, tokenizer, flag, **flags)
    key = [TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options)]
    facts = {"tokenizer": tokenizer, "options": options, "flag": flag, "first_row": first_row}
    cache = {"folder": "trainer_sft", "key": key, "features": sft_features()}
    return map_rows(rows, tokenize_row, **cache, num_proc=num_proc, **facts)


def options_of(
    rows: Any,
    tokenizer: Any,
    flag: str,
    *,
    input_key: str | None,
    output_key: str | None,
    input_template: str | None,
    apply_chat_template: bool,
    train_on: str | None,
    pretrain_mode: bool,
    max_len: int,
    ignore_columns: str | None = None,
    system: str | None = None,
) -> _Options:
    """Decide how rows become samples, and check the flags against the columns. Raises UserError.

    `rows` have column_names, and features where they are known.
    """
    columns = rows.column_names
    if tokenizer.eos_token_id is None:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no sample could end")
    # a prompt whose column no flag names becomes a turn where a template makes turns
    is_texts = output_key is not None and (input_key is not None or not tokenizer.chat_template)
    is_texts = is_texts and not apply_chat_template
    reader = reader_of(
        SFT,
        rows,
        chat=True if apply_chat_template else False if is_texts and not pretrain_mode else None,
        ignored=ignore_columns,
        system=system,
        prompt_key=input_key,
        answer_keys=(output_key,) if output_key is not None else (),
        pretrain=pretrain_mode,
        has_template=bool(tokenizer.chat_template),
        openings=openings_of(tokenizer),
        input_template=input_template is not None,
    )
    flags = {"pretrain_mode": pretrain_mode, "apply_chat_template": apply_chat_template, "train_on": train_on}
    flags |= {"output_key": output_key, "input_template": input_template, "system": system}
    refuse_for_rows(has_conversations=_has_conversations(reader, columns), **flags)
    check_input_template(input_template)
    _check_columns(reader, rows, tokenizer, flag)
    return _Options(reader, input_template, train_on or "last", max_len, trained_ends(tokenizer))


def with_loss(
    samples: Dataset, flag: str, max_len: int, allow_no_stop: bool, columns: Sequence[str] = ()
) -> tuple[Dataset, Ledger]:
    """The samples with a loss token, and the ledger. Raises UserError if none is left, and like `check_stops`.

    `columns` are those of the rows.
    """
    kept = column_of(samples, "num_loss_tokens") > 0

    def total(name: str, where: np.ndarray | bool = True) -> int:  # one column at a time: there may be a billion rows
        return int(column_of(samples, name).sum(dtype=np.int64, where=where))

    counts = {
        "num_rows": len(samples),
        "num_truncated": total("truncated"),  # rows longer than max_len, with or without a loss token left
        "num_excluded": int((~kept).sum()),  # rows without a loss token: the answer is empty or was cut off
        "num_samples": int(kept.sum()),
        "num_tokens": total("num_tokens", kept),
        "num_loss_tokens": total("num_loss_tokens"),
        "num_stop_trained": total("stop_trained", kept),  # samples with a loss on a token that ends an answer
    }
    ledger = ledger_of(samples, flag, counts, SENTENCE)
    if not kept.any():
        empty, cut = total("empty"), len(samples) - total("empty")
        wanted = (
            f"answers that fit into --max_len {max_len}"
            if cut >= empty
            else "train_dpo or train_rm for pairs of answers"
            if {"chosen", "rejected"} <= {*columns}
            else "answers that are not empty, and that no key or column leaves out; train_ppo for prompts alone"
        )
        found = f"no sample is left: {counted(empty, 'row has', 'rows have')} no answer to train, {counted(cut, 'is', 'are')} cut off ({ledger.summary()})"
        raise UserError(flag, found, wanted)
    ledger.lines += check_stops(counts, total("truncated", kept) == counts["num_samples"], flag, allow_no_stop)
    samples = samples.select_columns([name for name in samples.column_names if name not in LEDGER_COLUMNS])
    return keep(samples, kept), ledger


def _has_conversations(reader: RowReader, columns: list[str]) -> bool | None:
    """Whether some rows become conversations. None: each row decides."""
    if reader.chat is not None or reader.pretrain:
        return bool(reader.chat)
    if reader.prompt_key is None and any(name in columns for name in CONVERSATIONS):
        return True
    return None if reader.prompt_key or any(name in columns for name in (*PROMPTS, *MORE)) else False


def _check_columns(reader: RowReader, rows: Any, tokenizer: Any, flag: str) -> None:
    """Check the named keys, and whether anything in these columns can be learned from."""
    columns, key = rows.column_names, reader.prompt_key or ("text" if reader.pretrain else None)
    [answer_key] = reader.answer_keys or [None]
    check_keys(columns, flag, {"--input_key": key, "--output_key": answer_key})
    conversation = any(name in columns for name in CONVERSATIONS)
    if reader.chat or (reader.chat is None and key is None and conversation):
        chat_template(tokenizer)  # raises if there is none
    if key is None and not any(name in columns for name in BEFORE_ANSWER):
        if reader.chat or reader.answer_keys:
            raise UserError("--input_key", f"needed for {flag}", ", ".join(columns))
        if "text" not in columns:
            refuse_other_sets(columns, flag)
            first = rows[0] if isinstance(rows, Dataset) and len(rows) else {}  # not of a stream
            allowed = flag_of_inner(first, "--input_key") or needed(columns)
            raise UserError(flag, f"nothing says what to learn from the columns {', '.join(columns)}", allowed)


def sft_features() -> Features:
    """The columns of tokenized rows, before `with_loss`."""
    names = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8")), "digest": Value("string")}
    names |= {name: Value("int64") for name in ("num_tokens", "num_loss_tokens", "row")} | {NOTE: Value("string")}
    return Features(names | {name: Value("bool") for name in FLAGS})


def tokenize_row(
    row: Any, index: int, *, tokenizer: Any, options: _Options, flag: str, first_row: int = 0
) -> dict[str, Any]:
    """The columns of one row, as in `sft_features`. Its loss_mask is not shifted."""
    index += first_row
    with within(f"{flag} row {index + 1}"):
        row = options.reader.read(row)
        tokenize = _from_chat if row.chat else _from_text if row.get("text") is not None else _from_parts
        input_ids, loss_mask = tokenize(row, tokenizer, options)
        note_lost(row.notes, tokenizer, row.data(), input_ids)
    loss_mask = loss_mask if row.trained else [0] * len(loss_mask)
    truncated, empty = len(input_ids) > options.max_len, not any(loss_mask)
    input_ids, loss_mask = input_ids[: options.max_len], loss_mask[: options.max_len]
    loss_mask[:1] = [0] * len(loss_mask[:1])  # nothing predicts the first token
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "num_tokens": len(input_ids),
        "num_loss_tokens": sum(loss_mask),
        "digest": digest_of(input_ids),
        "row": index,
        "truncated": truncated,
        "empty": empty,
        "stop_trained": trains_stop(tokenizer, input_ids, loss_mask),
        "control_tokens": holds_controls(tokenizer, *row.texts()),
        NOTE: row.notes.as_text(),
    }


def _from_parts(row: ReadRow, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    row.notes.facts |= notes_of_prompt(tokenizer, row["prompt"], options.input_template, options.ends)
    return prompt_and_answer(tokenizer, row["prompt"], row["answer"], options.input_template, options.ends)


def _from_text(row: ReadRow, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    return whole_text(tokenizer, row["text"])


def _from_chat(row: ReadRow, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    tools = tools_of(row)
    template = chat_template(tokenizer, tools)
    refuse_for_rows(input_template=options.input_template, has_conversations=True)
    messages = row.messages("prompt", "user", template) + row.messages("answer", "assistant", template)
    multiturn = options.train_on == "all"
    with arguments_of_row(tokenizer, row.get(TEMPLATE_ARGS)):
        row.notes.facts |= notes_of_template(tokenizer, tools)
        return render_chat(tokenizer, messages, multiturn=multiturn, tools=tools, notes=row.notes)


def render_sample(sample: dict[str, Any], tokenizer: Any) -> str:
    """Decode a sample, with its targets (loss tokens) in [[ ]]."""
    pieces, start, before = [], 0, ""
    for is_target, group in groupby(sample["loss_mask"]):
        start += len(list(group))
        # Decode from the beginning: a span decoded separately would lose the space at the start of its first token.
        text = tokenizer.decode(sample["input_ids"][:start], clean_up_tokenization_spaces=False)
        piece = text[len(before) :]
        pieces.append(f"[[{piece}]]" if is_target else piece)
        before = text
    text = "".join(pieces)
    return re.sub(r"(<[^<>]+>|\[\w+\])\1{3,}", r"\1...", text) if COLUMN in sample else text  # tokens of an image

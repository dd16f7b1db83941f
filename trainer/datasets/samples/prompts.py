"""Turn rows into prompts for reinforcement learning: token ids, a label for the reward, and a ledger of the rows."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets

from trainer.comma_separated import names_in
from trainer.datasets.conversations.control_tokens import holds_controls
from trainer.datasets.conversations.lost_characters import note_lost
from trainer.datasets.conversations.messages import tools_of
from trainer.datasets.conversations.rendering import chat_template, note_of_choice
from trainer.datasets.conversations.templates import arguments_of_row, render_prompt
from trainer.datasets.conversations.tokens import TOKENIZER_VERSION, digest_of, prompt_tokens, tokenizer_state
from trainer.datasets.conversations.turn_ends import openings_of
from trainer.datasets.library import map_cached
from trainer.datasets.rows import check_keys, kind_of, lookup, text_value, within
from trainer.datasets.samples.ledger import Ledger, keep, ledger_of
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.sets import Sets, tokens_of
from trainer.datasets.shapes.columns import BEFORE_ANSWER, TEMPLATE_ARGS
from trainer.datasets.shapes.notes import NOTE, summed
from trainer.datasets.shapes.prompt_part import flag_of_inner
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.references import possible_reference, reference_of
from trainer.datasets.shapes.row_reader import PROMPT, RowReader, reader_of
from trainer.datasets.text_flags import check_input_template
from trainer.errors import UserError
from trainer.flags.data_rules import refuse_for_rows
from trainer.metrics import counted

COLUMN = "column "  # before the name of a column that is kept for rewards
SENTENCE = (
    "{num_rows:row}: {num_samples:prompt}, excluded {num_too_long} longer than --prompt_max_len "
    "and {num_empty} empty; {num_tokens:token}"
)


@dataclass(frozen=True)
class _Options:
    """Everything that decides, together with the tokenizer, what a row becomes."""

    reader: RowReader
    label_key: str | None
    input_template: str | None
    is_known_label: bool = False  # no flag names its column
    may_lack_label: bool = False  # and no reward needs it, so no value of the column refuses a row
    answers = ()  # the parts of a row that are an answer, for images


def tokenize_prompts(
    rows: Dataset | Sets, tokenizer: Any, *, flag: str, max_len: int, part: Part = WHOLE, **flags: Any
) -> tuple[Dataset, Ledger]:
    """Return prompts in row order, and the ledger. They are cached on disk by rows, tokenizer and options.
    Both are those of `part`. `flags` go to `tokens_of_prompts`.

    The prompt is a text (put into input_template) or a list of messages. Messages, or apply_chat_template, select the
    chat template with its generation prompt. So does a text that no flag names, if there is a template and no input_template.
    Prompts longer than max_len tokens and empty prompts are left out.
    Columns: prompt_ids (int32), label (text; None without label_key), num_tokens, digest, row (index into `rows`).

    Raises: UserError for missing keys and values of another kind (with the row, counted from 1).
    """
    prompts = part.of(tokens_of(rows, tokens_of_prompts, tokenizer, flag=flag, max_len=max_len, **flags))
    lengths = np.asarray(prompts["num_tokens"])
    kept = _fits(prompts, max_len)
    counts = {
        "num_rows": len(prompts),
        "num_too_long": int((lengths > max_len).sum()),  # left out, because a cut prompt would ask something else
        "num_empty": int((lengths == 0).sum()),
        "num_samples": int(kept.sum()),
        "num_tokens": int(lengths[kept].sum()),
    }
    ledger = ledger_of(prompts, flag, counts, SENTENCE)
    if not kept.any():
        is_long = counts["num_too_long"] > counts["num_empty"]
        wanted = f"prompts of up to {counted(max_len, 'token')}" if is_long else "prompts that are not empty"
        raise UserError(flag, f"no prompt is left ({ledger.summary()})", wanted)
    return keep(prompts.remove_columns(["control_tokens", NOTE]), kept), ledger


def _fits(prompts: Dataset, max_len: int) -> np.ndarray:
    """The prompts that are used, (rows,) of bool."""
    lengths = np.asarray(prompts["num_tokens"])
    return (lengths > 0) & (lengths <= max_len)


def tokens_of_prompts(
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
    takes_labels: bool = False,
    ignore_columns: str | None = None,
    system: str | None = None,
    taken: Iterable[str] = (),
    drop_answer: bool = False,
    map_rows: Callable = map_cached,
) -> Dataset:
    """The prompts of one set, also empty ones and longer ones: see `tokenize_prompts`.

    taken: columns that rewards read. drop_answer: a conversation that ends with an answer loses it.
    With `needs_labels` and without label_key, the label is where the first row has it: see `reference_of`. With
    `takes_labels`, it may have none: see `possible_reference`.

    Raises: UserError, with `needs_labels` also for a prompt that is used and has no label, or an
    object, a list or a boolean as its label.
    """
    is_named, ignored, taken = bool(label_key), names_in(ignore_columns), tuple(taken)
    if not is_named and needs_labels:
        label_key = reference_of(rows[0], flag, ignored)
    elif not is_named and takes_labels:
        label_key = possible_reference(rows[0], ignored, taken)
    known = input_key is None and any(name in rows.column_names for name in BEFORE_ANSWER)
    if not known and input_key is None:
        found = f"missing, and no column of {flag} has a known name of a prompt"
        raise UserError(
            "--input_key",
            found,
            flag_of_inner(next(iter(rows), {}), "--input_key") or f"one of {', '.join(rows.column_names)}",
        )
    key = input_key
    check_keys(rows.column_names, flag, {"--input_key": key, "--label_key": label_key})
    reader = reader_of(
        PROMPT,
        rows,
        chat=apply_chat_template,
        ignored=ignore_columns,
        system=system,
        prompt_key=key,
        taken=(*taken, *([label_key] if label_key else [])),
        has_template=bool(tokenizer.chat_template),
        openings=openings_of(tokenizer),
        input_template=input_template is not None,
        drop_answer=drop_answer,
    )
    is_known = bool(label_key) and not is_named
    options = _Options(reader, label_key, input_template, is_known, is_known and not needs_labels)
    if reader.chat:
        chat_template(tokenizer)  # raises if there is none
    flags = {"apply_chat_template": apply_chat_template, "input_template": input_template}
    refuse_for_rows(**flags, has_conversations=bool(reader.chat))
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
    if needs_labels:
        _check_labels(keep(prompts, _fits(prompts, max_len)), rows, label_key, flag)
    return prompts


def _check_labels(prompts: Dataset, rows: Dataset, label_key: str, flag: str) -> None:
    """Raise UserError for a prompt without a label, or with an object, a list or a boolean instead of one."""
    for row, label in zip(prompts["row"], prompts["label"]):
        where = f"{flag} row {row + 1}: --label_key {label_key}"
        if not (label or "").strip():
            raise UserError(where, "no value" if label is None else "an empty text", "an answer to compare with")
        value = lookup(rows[row], label_key) if label.startswith(("{", "[", "true", "false")) else label
        if isinstance(value, (dict, list, bool)):
            inside = [f"{label_key}.{name}" for name in value] if isinstance(value, dict) else ["a text or a number"]
            raise UserError(where, f"{kind_of(value)}, not an answer", ", ".join(inside))


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
    texts = {name: Value("string") for name in ("label", "digest", NOTE)}
    return Features({"prompt_ids": List(Value("int32")), **numbers, **texts, "control_tokens": Value("bool")})


def _tokenize_row(row: Any, index: int, *, tokenizer: Any, options: _Options, flag: str) -> dict[str, Any]:
    with within(f"{flag} row {index + 1}"):
        row = options.reader.read(row)
        label = _label(row, options)
        prompt_ids = (_chat_prompt if row.chat else _text_prompt)(row, tokenizer, options)
    note_lost(row.notes, tokenizer, row.data(), prompt_ids)
    return {
        "prompt_ids": prompt_ids,
        "label": label if label is None or isinstance(label, str) else json.dumps(label, default=str),
        "num_tokens": len(prompt_ids),
        "digest": digest_of(prompt_ids),
        "row": index,
        "control_tokens": holds_controls(tokenizer, *row.texts()),
        NOTE: row.notes.as_text(),
    }


def _label(row: ReadRow, options: _Options) -> Any:
    """The label as its file has it; that of a number is its text. One that may be absent is so where it is no text.

    Raises: UserError for a label that a flag names, or that the reward needs.
    """
    key = options.label_key
    if not key:
        return None
    try:
        label = lookup(row.columns, key)
        if not isinstance(label, (str, bool, list, dict, type(None))):  # as an answer of train_sft
            label = text_value(label, f"--label_key {key}", numbers=True, narrow=key in options.reader.narrow)
    except UserError:
        if not options.may_lack_label:
            raise
        row.notes.facts.add(summed(f"{key} is taken for no label in {{:row}}; --label_key {key} says why"))
        return None
    if options.is_known_label:
        row.notes.shape += f", {key} -> label of the reward"
    return label


def _text_prompt(row: ReadRow, tokenizer: Any, options: _Options) -> list[int]:
    return prompt_tokens(tokenizer, row["prompt"], options.input_template) if row["prompt"].strip() else []


def _chat_prompt(row: ReadRow, tokenizer: Any, options: _Options) -> list[int]:
    refuse_for_rows(input_template=options.input_template, has_conversations=True)
    tools = tools_of(row)
    messages = row.messages("prompt", "user", chat_template(tokenizer, tools))
    if not any(message["content"].strip() for message in messages):
        return []
    if messages[-1]["role"] == "assistant":
        raise UserError(
            row.where["prompt"],
            "ends with an assistant message",
            "a prompt that the model answers, so rows without that message",
        )
    with arguments_of_row(tokenizer, row.get(TEMPLATE_ARGS)):
        row.notes.facts |= note_of_choice(tokenizer, tools)
        return render_prompt(tokenizer, messages, tools, row.notes)


def render_prompt_text(prompt: dict[str, Any], tokenizer: Any) -> str:
    """Show a prompt as the model sees it, and its label."""
    return f"{tokenizer.decode(prompt['prompt_ids'])}\nlabel: {prompt['label']}"

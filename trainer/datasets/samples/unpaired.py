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
from trainer.datasets.conversations.tokens import TOKENIZER_VERSION, digest_of, tokenizer_state, trains_stop
from trainer.datasets.library import map_cached, quiet
from trainer.datasets.rows import check_keys, column_of_key, lookup, truth_value, within
from trainer.datasets.samples.answers import (
    CUT_AWAY,
    EMPTY,
    KEPT,
    STOPS,
    STOPS_SENTENCE,
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
from trainer.datasets.shapes.answer_rows import PAIR_FLAGS, SIDES
from trainer.datasets.shapes.columns import (
    ANSWERS,
    CHOSEN,
    CONVERSATIONS,
    LABELS,
    MORE_ANSWERS,
    REJECTED,
    ROW,
    SIDE,
    VERDICTS,
    plain_name,
)
from trainer.datasets.shapes.columns import EMPTY as NO_VALUE
from trainer.datasets.shapes.notes import NOTE
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_reader import ANSWER, RowReader
from trainer.datasets.shapes.row_refusals import refuse_other_sets
from trainer.datasets.shapes.spellings import with_known_names
from trainer.errors import UserError

SENTENCE = (
    "{num_rows:row}: {num_samples:answer}, {num_desirable} of them desirable, excluded "
    "{num_empty} empty ones and {num_cut_away} cut away by --max_len; "
    "{num_truncated} truncated; {num_tokens:token}"
) + STOPS_SENTENCE


def unpair(rows: Dataset, pair: list[str], single: list[str]) -> Dataset:
    """The rows, with each pair twice: for its chosen answer, then for its rejected one, as the column SIDE says.

    `pair` are columns of pairs, `single` those of single answers and labels. ROW is the number of the row in `rows`.
    """
    sides: list[str | None] = []
    places: list[int] = []
    for number, row in enumerate(rows.select_columns([*pair, *single])):
        own = SIDES if _is_pair(row, pair, single) else (None,)
        sides += own
        places += [number] * len(own)
    if not any(sides):
        return rows
    with quiet():
        made = rows.select(places).add_column(SIDE, sides, feature=Value("string"))
        return made.add_column(ROW, places, feature=Value("int64"))


def _is_pair(row: dict, pair: list[str], single: list[str]) -> bool:
    """Whether a row is a pair, perhaps of two empty texts, or one that lacks an answer."""
    if any(row[name] not in NO_VALUE for name in pair):
        return True
    return all(row[name] is not None for name in pair) and all(row[name] in NO_VALUE for name in single)


def tokenize_unpaired(
    rows: Dataset | Sets,
    tokenizer: Any,
    *,
    flag: str,
    max_len: int,
    part: Part = WHOLE,
    allow_no_stop: bool = False,
    **flags: Any,
) -> tuple[Dataset, Ledger]:
    """Return answers in row order, and the ledger. They are cached on disk by rows, tokenizer and options.
    Both are those of `part`. `flags` go to `answer_tokens`.

    Prompt and answer become tokens as in `tokenize_preference`. Columns: input_ids (int32), loss_mask (int8), start (of
    the answer in input_ids), label (bool), num_tokens, num_loss_tokens (1: the loss is a mean over answers), digest,
    row (index into `rows`).

    Raises: UserError for missing keys and values of another kind (with the row, counted from 1). Also if no answer trains
    a stop token, unless `allow_no_stop` or `part` is for evaluation.
    """
    samples = tokens_of(rows, answer_tokens, tokenizer, flag=flag, max_len=max_len, **flags)
    totals = {"num_desirable": "label", "num_tokens": "num_tokens", STOPS: "stop_trained"}
    limits = {"max_len": max_len, "allow_no_stop": allow_no_stop or part.is_evaluation}
    kept, ledger = keep_answers(part.of(samples), "answer", SENTENCE, [EMPTY, CUT_AWAY], totals, flag=flag, **limits)
    num_desirable = ledger.counts["num_desirable"]
    if num_desirable in (0, len(kept)) and not part.is_evaluation:
        kind = "desirable" if num_desirable else "undesirable"
        ledger.lines.append(f"WARNING: all answers are {kind}, and KTO learns from both kinds")
    return kept, ledger


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
    allow_no_stop: bool = False,  # asked of all sets together
    ignore_columns: str | None = None,
    system: str | None = None,
    map_rows: Callable = map_cached,
) -> Dataset:
    """The tokens of every row of one set, also of those that are not trained: see `tokenize_unpaired`.

    A row is a pair, which becomes two answers, or it has a single answer and a label.
    """
    ignored = names_in(ignore_columns)
    named = [prompt_key, completion_key, label_key, chosen_key, rejected_key]
    rows, renamed = with_known_names(rows, [*named, *ignored])
    columns = [name for name in rows.column_names if name not in ignored]
    labels = [label_key, *(name for name in LABELS if name != label_key)] if label_key in LABELS else [label_key]
    keys = {"--prompt_key": prompt_key, "--completion_key": completion_key}
    pair_keys = dict(zip(PAIR_FLAGS, (chosen_key, rejected_key)))
    pair = _pair_columns(columns, pair_keys, {completion_key, label_key})
    if pair:
        rows = unpair(rows, pair, [name for name in (completion_key, *labels) if name in columns])
    has_pairs = SIDE in rows.column_names
    known = completion_key == "completion" and (
        has_pairs or any(name in columns for name in (*ANSWERS, *MORE_ANSWERS, *CONVERSATIONS))
    )
    if not known and not column_of_key(columns, completion_key):
        refuse_other_sets(columns, flag)
    needed = {} if known else dict(keys)
    if not (label_key in LABELS and (has_pairs or any(name in columns for name in labels))):
        needed |= {"--label_key": label_key}
    needed |= {name: key for name, key in pair_keys.items() if key != name[2:-4]}
    check_keys(columns, flag, {"--prompt_key": prompt_key, **needed})
    reading = {
        "ignored": ignore_columns,
        "system": system,
        "taken": tuple(labels),
        "pair_keys": (chosen_key, rejected_key),
        "renamed": renamed,
    }
    options = answer_options(
        rows, tokenizer, ANSWER, keys, ("completion",), input_template, apply_chat_template, max_len, **reading
    )
    return map_rows(
        rows,
        _tokenize_row,
        folder="trainer_unpaired",
        key=[TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options), "each row decides", "stops"],
        features=_features(),
        num_proc=num_proc,
        tokenizer=tokenizer,
        options=options,
        flag=flag,
    )


def _pair_columns(columns: list[str], keys: dict[str, str], others: set[str]) -> list[str]:
    """The columns that may hold the answers of a pair. None without one for the rejected answer, or if `others` has one."""
    names = [
        [name for name in ((key, *known) if key == flag[2:-4] else (key,)) if name in columns]
        for (flag, key), known in zip(keys.items(), (CHOSEN, REJECTED))
    ]
    found = list(dict.fromkeys([*names[0], *names[1]]))
    return found if names[1] and not others & set(found) else []


def _features() -> Features:
    numbers = {name: Value("int64") for name in ("start", "num_tokens", "num_loss_tokens", "row")}
    tokens = {"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))}
    flags = {name: Value("bool") for name in ("label", "truncated", "stop_trained", "control_tokens")}
    texts = {name: Value("string") for name in ("digest", "fate", NOTE)}
    return Features({**tokens, **numbers, **flags, **texts})


def _tokenize_row(row: Any, index: int, *, tokenizer: Any, options: AnswerOptions, flag: str) -> dict[str, Any]:
    index = getattr(row, "columns", row).get(ROW, index)  # a row with images was read before
    with within(f"{flag} row {index + 1}"):
        row = options.reader.read(row)
        side = row.columns.get(SIDE)
        label = side == "chosen" if side else _label(row, options.reader)
        ids, mask = tokenize_answer(row, "completion", tokenizer, options)
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
        "stop_trained": trains_stop(tokenizer, cut, cut_mask),
        "control_tokens": holds_controls(tokenizer, *row.texts()),
        NOTE: row.notes.as_text(),
    }


def _label(read: ReadRow, reader: RowReader) -> bool:
    """Whether a single answer is good. Raises UserError for no label, and for two that contradict each other."""
    row = read.columns
    values = {name: lookup(row, name) for name in reader.taken if name not in reader.ignored}
    key, value = next(((n, v) for n, v in values.items() if v not in NO_VALUE), (reader.taken[0], None))
    label = truth_value(value)
    if label is None:
        found = "no value, and no pair" if value is None else repr(value)
        raise UserError(f"--label_key {key}", found, "true or false, 1 or 0")
    others = [name for name in row if plain_name(name) in VERDICTS and name not in reader.ignored]
    _check_messages(read, label, reader.ignored)
    for other in others if key in LABELS else ():
        if truth_value(row[other]) not in (None, label):
            found = f"{value!r} and {row[other]!r}"
            raise UserError(f"columns {key} and {other}", found, f"one label; {IGNORE} with one of them")
    return label


def _check_messages(row: ReadRow, label: bool, ignored: tuple[str, ...]) -> None:
    """Raise UserError for a message whose own label is another one than that of its row."""
    for part in ("prompt", "completion"):
        for number, message in enumerate(row[part] if isinstance(row[part], list) else [], 1):
            keys = [key for key in message if plain_name(key) in VERDICTS] if isinstance(message, dict) else []
            for key in keys:
                if key not in ignored and truth_value(message[key]) is (not label):
                    found = f"{message[key]!r} contradicts the label of the row"
                    raise UserError(f"{row.where[part]} message {number} {key}", found, f"{IGNORE} {key}")


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

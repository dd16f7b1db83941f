"""Turn a prompt and an answer into tokens, and collate micro-batches. Paired and unpaired preferences share this."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.datasets.conversations.messages import TRAIN, tools_of
from trainer.datasets.conversations.rendering import chat_template
from trainer.datasets.conversations.templates import arguments_of_row, notes_of_template, render_chat
from trainer.datasets.conversations.tokens import NO_TURN, notes_of_prompt, prompt_and_answer, whole_text
from trainer.datasets.conversations.turn_ends import TurnEnds, openings_of, trained_ends, turn_ends
from trainer.datasets.samples.ledger import Ledger, keep, ledger_of
from trainer.datasets.samples.stops import check_stops
from trainer.datasets.shapes.columns import BEFORE_ANSWER, TEMPLATE_ARGS
from trainer.datasets.shapes.notes import NOTE, Notes
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_reader import RowReader, reader_of
from trainer.datasets.text_flags import check_input_template
from trainer.errors import UserError
from trainer.flags.data_rules import refuse_for_rows

# what becomes of a row, in its column `fate`; only rows with "kept" are trained
KEPT, IDENTICAL, EMPTY, CUT_AWAY = "kept", "identical", "empty", "cut away"
STOPS, STOPS_SENTENCE = "num_stop_trained", "; stop token trained in {num_stop_trained} of {num_samples}"
ALL_TURNS = ("all turns of an answer have a loss", "answers of one message")


@dataclass(frozen=True)
class AnswerOptions:
    """Everything that decides, together with the tokenizer, the tokens of the answers of a row."""

    reader: RowReader
    answers: tuple[str, ...]  # the parts of a row that are answers; each one ends a separate conversation
    input_template: str | None
    max_len: int
    ends: TurnEnds = NO_TURN  # of answers to prompts that are rendered already


def answer_options(
    rows: Dataset,
    tokenizer: Any,
    task: str,
    keys: dict[str, str | None],
    parts: tuple[str, ...],
    input_template: str | None,
    apply_chat_template: bool,
    max_len: int,
    scored: bool = False,
    **reading: Any,
) -> AnswerOptions:
    """Make the options. `keys`: the flags of the prompt and of the answers, with their columns.

    `scored`: the answers end as rewards read them, see `trained_ends`.

    Raises: UserError for a tokenizer without eos or chat template, and for an input_template that cannot be used.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no answer could end")
    columns, (prompt_key, *answer_keys) = rows.column_names, keys.values()
    prompt_flag, *answer_flags = keys
    reader = reader_of(
        task,
        rows,
        chat=apply_chat_template,
        prompt_key=prompt_key,
        answer_keys=tuple(answer_keys),
        prompt_flag=prompt_flag,
        answer_flags=tuple(answer_flags),
        has_template=bool(tokenizer.chat_template),
        openings=openings_of(tokenizer),
        input_template=input_template is not None,
        **reading,
    )
    has_prompt = prompt_key is not None or any(name in columns for name in BEFORE_ANSWER)
    if reader.chat:
        chat_template(tokenizer)  # raises if there is none
    facts = {"has_conversations": bool(reader.chat), "has_prompts": has_prompt}
    refuse_for_rows(apply_chat_template=apply_chat_template, input_template=input_template, **facts)
    check_input_template(input_template)
    ends = turn_ends(tokenizer) if scored else trained_ends(tokenizer)
    return AnswerOptions(reader, parts, input_template, max_len, ends)


def tokenize_answer(row: ReadRow, part: str, tokenizer: Any, options: AnswerOptions) -> tuple[list[int], list[int]]:
    """Tokenize the prompt and the answer `part` to (input_ids, loss_mask), without a cut to max_len.

    An empty answer has no loss token. The first token is never a target, because nothing predicts it.
    """
    input_ids, mask = (_chat_answer if row.chat else _text_answer)(row, part, tokenizer, options)
    return input_ids, [0, *mask[1:]]


def _text_answer(row: ReadRow, part: str, tokenizer: Any, options: AnswerOptions):
    if row["prompt"] is None:  # whole texts: the part that both share cancels in every preference
        return whole_text(tokenizer, row[part], options.ends)
    row.notes.facts |= notes_of_prompt(tokenizer, row["prompt"], options.input_template, options.ends)
    return prompt_and_answer(tokenizer, row["prompt"], row[part], options.input_template, options.ends)


def _chat_answer(row: ReadRow, part: str, tokenizer: Any, options: AnswerOptions):
    refuse_for_rows(input_template=options.input_template, has_conversations=True)
    tools = tools_of(row)
    messages = conversation_of(row, part, chat_template(tokenizer, tools))
    if not messages or messages[-1]["role"] != "assistant":
        raise UserError(row.where[part], "does not end with an assistant message", "an answer")
    with arguments_of_row(tokenizer, row.get(TEMPLATE_ARGS)):
        row.notes.facts |= notes_of_template(tokenizer, tools)
        if not messages[-1]["content"].strip() and not messages[-1].get("tool_calls"):
            # an empty answer has no loss token: an earlier turn must not be trained instead
            return render_chat(tokenizer, messages[:-1], multiturn=False, tools=tools)[0], []
        notes = Notes(keys=row.notes.keys)  # other facts there are about a loss on one turn
        return render_chat(tokenizer, messages, multiturn=False, tools=tools, notes=notes, asks=ALL_TURNS)


def conversation_of(row: ReadRow, part: str, template: str | None) -> list[dict]:
    """The prompt and the answer `part` as messages. `TRAIN` marks the turns of the assistant that are compared.

    They are those after the prompt, or the last one of a whole conversation, whatever the keys of messages say.
    """
    prompt, answer = row.messages("prompt", "user", template), row.messages(part, "assistant", template)
    if any(TRAIN in message for message in (*prompt, *answer)):
        row.notes.facts.add("weight, loss and train of messages are not used: the last answer is what is compared")
    whole = [*prompt, *answer]
    start = len(prompt) if prompt and answer and answer[0]["role"] == "assistant" else len(whole) - 1
    own = [number for number, message in enumerate(whole) if number >= start and message["role"] == "assistant"]
    if len(own) > 1:
        row.notes.facts.add("loss on all turns of the assistant in an answer of several messages")
    return [message | {TRAIN: number in own} for number, message in enumerate(whole)]


def keep_answers(
    samples: Dataset,
    noun: str,
    sentence: str,
    fates: list[str],
    totals: dict[str, str],
    *,
    flag: str,
    max_len: int,
    allow_no_stop: bool,
) -> tuple[Dataset, Ledger]:
    """The samples whose fate is KEPT, and the ledger. Raises UserError if no `noun` is left, and like `check_stops`.

    `fates` are counted: "cut away" as num_cut_away. `totals` are sums over the kept samples: name of a count -> column.
    Without the count num_stop_trained in `totals`, nothing has to end.
    """
    facts = samples.with_format("numpy").select_columns(["fate", "truncated", *totals.values()])[:]
    kept, all_fates = facts["fate"] == KEPT, list(facts["fate"])
    ledger = ledger_of(
        samples,
        flag,
        {
            "num_rows": len(samples),
            **{f"num_{fate.replace(' ', '_')}": all_fates.count(fate) for fate in fates},
            "num_truncated": int(facts["truncated"].sum()),  # rows that --max_len cut, kept or not
            "num_samples": int(kept.sum()),
            **{name: int(facts[column][kept].sum()) for name, column in totals.items()},
        },
        sentence,
    )
    if not kept.any():
        wanted = {IDENTICAL: "answers that differ", EMPTY: "answers that are not empty"}
        allowed = wanted.get(max(fates, key=all_fates.count), f"answers that fit into --max_len {max_len}")
        raise UserError(flag, f"no {noun} is left ({ledger.summary()})", allowed)
    if STOPS in totals:
        all_cut = bool(facts["truncated"][kept].all())
        ledger.lines += check_stops(ledger.counts, all_cut, flag, allow_no_stop)
    return keep(samples.remove_columns(["fate", "truncated", "stop_trained", "control_tokens", NOTE]), kept), ledger


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

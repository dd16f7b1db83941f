"""Turn rows of preferences into pairs of token samples (a chosen and a rejected answer), and a ledger of the rows."""

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
from trainer.datasets.library import map_cached
from trainer.datasets.rows import check_keys, column_of_key, lookup, number_value, within
from trainer.datasets.samples.answers import (
    CUT_AWAY,
    EMPTY,
    IDENTICAL,
    KEPT,
    STOPS,
    STOPS_SENTENCE,
    AnswerOptions,
    answer_options,
    collate_sequences,
    conversation_of,
    keep_answers,
    tokenize_answer,
)
from trainer.datasets.samples.ledger import Ledger
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.sets import Sets, tokens_of
from trainer.datasets.samples.sft_samples import render_sample
from trainer.datasets.shapes.answer_rows import SIDES
from trainer.datasets.shapes.columns import (
    ANSWERS,
    BEFORE_ANSWER,
    BESIDE_ANSWER,
    CHOSEN,
    CONVERSATIONS,
    REJECTED,
    plain_name,
)
from trainer.datasets.shapes.columns import EMPTY as EMPTY_VALUES
from trainer.datasets.shapes.notes import NOTE
from trainer.datasets.shapes.prompt_part import is_answer
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_reader import PAIRS
from trainer.datasets.shapes.row_refusals import refuse_other_sets
from trainer.datasets.shapes.spellings import with_known_names
from trainer.errors import UserError
from trainer.metrics import counted

ENDED = "num_ended_by_eos"  # a count of the ledger, if it is not 0
SENTENCE = (
    "{num_rows:row}: {num_samples:pair}, excluded {num_identical} with identical answers, "
    "{num_empty} with an empty one and {num_cut_away} cut away by --max_len; "
    "{num_truncated} truncated; {num_tokens:token}"
)


def tokenize_preference(
    rows: Dataset | Sets,
    tokenizer: Any,
    *,
    flag: str,
    max_len: int,
    part: Part = WHOLE,
    allow_no_stop: bool = False,
    scored: bool = False,
    **flags: Any,
) -> tuple[Dataset, Ledger]:
    """Return pairs in row order, and the ledger. They are cached on disk by rows, tokenizer and options.
    Both are those of `part`. `flags` go to `pair_tokens`.

    The prompt is a text or a list of messages. Each answer is a text or a list of messages that follow the prompt.
    Without a prompt column, both answers are whole conversations that share all but their last message.
    Any list of messages, or apply_chat_template, selects the chat template; so does a text that no flag names if the
    tokenizer has one and there is no input_template. Otherwise a side is the prompt (put into
    input_template), the answer and eos. The mask is on the answer (its last turn). Each side is cut on the right to
    max_len tokens, so a cut side has no eos.

    Columns: {chosen,rejected}_ids (int32), {chosen,rejected}_mask (int8), margin (0 without margin_key), num_tokens (of
    both sides), num_loss_tokens (1: a preference loss is a mean over pairs), digest, row (index into `rows`).

    `scored`: the pairs are those of a reward model. It writes no answers, so they need not end.

    Raises: UserError for missing keys and values of another kind (with the row, counted from 1). Also if no chosen
    answer trains a stop token, unless `allow_no_stop` or `part` is for evaluation.
    """
    pairs = tokens_of(rows, pair_tokens, tokenizer, flag=flag, max_len=max_len, scored=scored, **flags)
    # identical: neither answer is better. cut away: --max_len leaves nothing of one answer, or no difference
    fates, totals = [IDENTICAL, EMPTY, CUT_AWAY], {"num_tokens": "num_tokens"}
    sentence = SENTENCE if scored else SENTENCE + STOPS_SENTENCE
    totals |= {} if scored else {STOPS: "stop_trained"}
    limits = {"max_len": max_len, "allow_no_stop": allow_no_stop or part.is_evaluation}
    pairs = part.of(pairs)
    samples, ledger = keep_answers(pairs, "pair", sentence, fates, totals, flag=flag, **limits)
    if scored and (num_ended := _num_ended(pairs, flag)):
        ledger.counts[ENDED] = num_ended
        ledger.lines.append(
            f"{counted(num_ended, 'answer spells', 'answers spell')} out eos, so scores are of answers with eos"
        )
    return samples.remove_columns("ended"), ledger


def _num_ended(pairs: Dataset, flag: str) -> int:
    """How many answers spell out eos where the chat template ends none. Raises UserError if others do not.

    Scores of a policy's answers are with eos, or all without: see `scored_ends`.
    """
    facts = pairs.with_format("numpy").select_columns(["fate", "truncated", "ended", "row"])[:]
    uncut = (facts["fate"] == KEPT) & ~facts["truncated"]
    ended, rows = facts["ended"][uncut], facts["row"][uncut]
    if 0 < ended.sum() < 2 * len(ended):
        found = f"{ended.sum()} of {2 * len(ended)} answers spell out eos, and the chat template ends none"
        odd = rows[ended < 2] if ended.sum() > len(ended) else rows[ended > 0]
        raise UserError(f"{flag} row {odd[0] + 1}", found, "all answers with eos, or none")
    return int(ended.sum())


def pair_tokens(
    rows: Dataset,
    tokenizer: Any,
    *,
    flag: str,
    prompt_key: str | None,
    chosen_key: str,
    rejected_key: str,
    margin_key: str | None,
    input_template: str | None,
    apply_chat_template: bool,
    max_len: int,
    num_proc: int | None = None,
    mean_flag: str | None = None,
    scored: bool = False,
    allow_no_stop: bool = False,  # asked of all sets together
    ignore_columns: str | None = None,
    system: str | None = None,
    map_rows: Callable = map_cached,
) -> Dataset:
    """The tokens of every row of one set, also of those that are not trained: see `tokenize_preference`.

    `mean_flag` names a flag that takes means over the answer's tokens. Then whole texts are refused: they do not show
    where the answer begins, so a mean would include the prompt. The prompt cancels only in differences of sums.
    `scored`: the pairs are those of a reward model.
    """
    rows, renamed = with_known_names(
        rows, [prompt_key, chosen_key, rejected_key, margin_key, *names_in(ignore_columns)]
    )
    columns = rows.column_names
    keys = {"--prompt_key": prompt_key, "--chosen_key": chosen_key, "--rejected_key": rejected_key}
    answers = ANSWERS if BESIDE_ANSWER in columns else ()
    others = {"--chosen_key": (*CHOSEN, *CONVERSATIONS, *answers), "--rejected_key": REJECTED}  # known names
    there = {f for f, names in others.items() if keys[f] == f[2:-4] and any(name in columns for name in names)}
    if "--chosen_key" not in there and not column_of_key(columns, chosen_key):
        refuse_other_sets(columns, flag)
    if "--rejected_key" not in there and rejected_key == "rejected":
        instead = "train_sft or train_kd for rows with one answer; train_dpo --loss kto for answers with a label"
        found = "no column is known as the rejected answer"
        raise UserError(f"{flag} columns {', '.join(columns)}", found, f"--rejected_key with its column; {instead}")
    check_keys(columns, flag, {**{f: key for f, key in keys.items() if f not in there}, "--margin_key": margin_key})
    reading = {"ignored": ignore_columns, "system": system, "taken": (margin_key,) if margin_key else ()}
    reading["renamed"] = renamed
    options = answer_options(
        rows, tokenizer, PAIRS, keys, SIDES, input_template, apply_chat_template, max_len, scored, **reading
    )
    has_prompt = prompt_key is not None or any(name in columns for name in BEFORE_ANSWER)
    if mean_flag and not has_prompt and not options.reader.read(rows[0]).chat:
        found = f"missing with {mean_flag}: it takes means over the answer's tokens, but whole texts are in {flag}"
        raise UserError("--prompt_key", found, "the column of the prompt, or conversations")
    return map_rows(
        rows,
        _tokenize_row,
        folder="trainer_preference",
        key=[TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options), margin_key, scored],
        features=_features(),
        num_proc=num_proc,
        tokenizer=tokenizer,
        options=options,
        margin_key=margin_key,
        scored=scored,
        flag=flag,
    )


def _features() -> Features:
    ids = {f"{side}_ids": List(Value("int32")) for side in SIDES}
    masks = {f"{side}_mask": List(Value("int8")) for side in SIDES}
    numbers = {name: Value("int64") for name in ("num_tokens", "num_loss_tokens", "row", "ended")}
    others = {name: Value("string") for name in ("digest", "fate", NOTE)} | {"margin": Value("float64")}
    flags = {name: Value("bool") for name in ("truncated", "stop_trained", "control_tokens")}
    return Features({**ids, **masks, **numbers, **others, **flags})


def _tokenize_row(
    row: Any, index: int, *, tokenizer: Any, options: AnswerOptions, margin_key: str | None, scored: bool, flag: str
) -> dict[str, Any]:
    with within(f"{flag} row {index + 1}"):
        row = options.reader.read(row)
        margin = _margin(row.columns, margin_key)
        if scored and margin_key is None:
            _refuse_margin(row.columns, options.reader.ignored)
        _check_shared_turns(row)
        sides = {side: tokenize_answer(row, side, tokenizer, options) for side in SIDES}
    whole = {side: list(ids) for side, (ids, _) in sides.items()}
    note_lost(row.notes, tokenizer, row.data(), *whole.values())
    result: dict[str, Any] = {"margin": margin, "row": index, "num_loss_tokens": 1, "fate": KEPT}
    for side, (ids, mask) in sides.items():
        result[f"{side}_ids"], result[f"{side}_mask"] = ids[: options.max_len], mask[: options.max_len]
    if whole["chosen"] == whole["rejected"]:
        result["fate"] = IDENTICAL
    elif not all(any(mask) for _, mask in sides.values()):
        result["fate"] = EMPTY
    elif result["chosen_ids"] == result["rejected_ids"] or not all(any(result[f"{side}_mask"]) for side in SIDES):
        result["fate"] = CUT_AWAY
    result["truncated"] = any(len(ids) > options.max_len for ids in whole.values())
    result["stop_trained"] = trains_stop(tokenizer, result["chosen_ids"], result["chosen_mask"])
    has_no_end = bool(options.ends.opening) and not options.ends.closes
    result["ended"] = sum(has_no_end and ids[-1:] == [tokenizer.eos_token_id] for ids in whole.values())
    result["control_tokens"] = holds_controls(tokenizer, *row.texts())
    result["num_tokens"] = len(result["chosen_ids"]) + len(result["rejected_ids"])
    result[NOTE] = row.notes.as_text()
    result["digest"] = digest_of(result["chosen_ids"]) + digest_of(result["rejected_ids"])
    return result


def _margin(row: Any, key: str | None) -> float:
    return 0.0 if key is None else number_value(lookup(row, key), f"--margin_key {key}")


def _refuse_margin(columns: Any, ignored: tuple[str, ...]) -> None:
    """Raise UserError for a margin that no flag names: TRL takes it from a column of this name."""
    for name, value in columns.items():
        if plain_name(name) in ("margin", "margins") and name not in ignored and value not in (*EMPTY_VALUES, 0):
            found = f"{str(value)[:40]!r} would change the loss, and is not used here"
            raise UserError(f"column {name}", found, f"--margin_key {name} with --loss sigmoid, or {IGNORE} {name}")


def _check_shared_turns(row: ReadRow) -> None:
    """Check that whole conversations on both sides share all but their last message."""
    whole = any(isinstance(row[side], list) and row[side] and not is_answer(row[side][0]) for side in SIDES)
    if not row.chat or not (whole or row["prompt"] is None):
        return
    chosen, rejected = (conversation_of(row, side, None) for side in SIDES)
    if chosen[:-1] != rejected[:-1]:
        found = "the conversations differ before their last message"
        raise UserError(row.where["chosen"], found, "a shared prompt")


def collate_pairs(
    samples: list[dict], pad_token_id: int, packed: bool, collate: Callable | None = None
) -> dict[str, torch.Tensor]:
    """Collate n pairs into a micro-batch for one forward pass; see `collate_sequences`.

    Chosen sides are the sequences 0 to n - 1. Rejected sides are the sequences n to 2 n - 1.
    Per pair (n,): rows (index into the data), margins, has_loss, and log-probs of the two answers: ref_* by the
    reference, engine_* by the engine that sampled them. Their shape is (0,) if the pairs do not have them.
    """
    sides = [
        {**sample, "input_ids": list(sample[f"{side}_ids"]), "loss_mask": list(sample[f"{side}_mask"])}
        for side in SIDES
        for sample in samples
    ]
    batch = collate_sequences(sides, pad_token_id, packed, collate)
    batch["rows"] = torch.tensor([sample["row"] for sample in samples], dtype=torch.long)
    for name in (f"{who}_{side}" for who in ("ref", "engine") for side in SIDES):
        batch[name] = torch.tensor([sample[name] for sample in samples if name in sample], dtype=torch.float64)
    batch["margins"] = torch.tensor([float(sample["margin"]) for sample in samples])
    batch["has_loss"] = torch.tensor([sample.get("num_loss_tokens", 1) > 0 for sample in samples], dtype=torch.bool)
    return batch


def render_pair(pair: dict[str, Any], tokenizer: Any) -> str:
    """Decode both sides of a pair, with the loss tokens in [[ ]]."""
    sides = ({**pair, "input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_mask"]} for side in SIDES)
    return "\n".join(f"{name}: {render_sample(side, tokenizer)}" for name, side in zip(SIDES, sides))

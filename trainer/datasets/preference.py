"""Rows of preferences to pairs of token samples: one answer chosen, one rejected, and a ledger of it all."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.datasets.packing import collate_packed, collate_padded
from trainer.datasets.rows import (
    digest_of,
    map_cached,
    messages_of,
    text_of,
    tokenizer_state,
    with_eos,
    with_special_tokens,
)
from trainer.datasets.sft import render_sample
from trainer.datasets.templates import chat_template, render_chat
from trainer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, Features

# Raise it whenever the same rows and options would give other samples, so that no older cache file is taken for them.
TOKENIZER_VERSION = 1
SIDES = ("chosen", "rejected")
# what became of a pair; "kept" is the only one that is trained on
KEPT, IDENTICAL, EMPTY, CUT_AWAY = "kept", "identical", "empty", "cut away"


@dataclass
class PreferenceLedger:
    """What became of the rows of one dataset; token counts are those of both sides of the pairs that are left."""

    num_rows: int = 0
    num_identical: int = 0  # ties: both answers are the same tokens, so nothing says which is better
    num_empty: int = 0  # one answer is empty
    num_cut_away: int = 0  # --max_len leaves nothing of one answer, or nothing that tells the two apart
    num_truncated: int = 0  # pairs of which --max_len cut a side, whether or not they are left
    num_samples: int = 0
    num_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def summary(self) -> str:
        return (
            f"{self.num_rows} rows: {self.num_samples} pairs, excluded {self.num_identical} with identical answers, "
            f"{self.num_empty} with an empty one and {self.num_cut_away} cut away by --max_len; "
            f"{self.num_truncated} truncated; {self.num_tokens} tokens"
        )


@dataclass(frozen=True)
class _Options:
    """All that decides, with the tokenizer, what a row becomes."""

    chat: bool
    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    margin_key: str | None
    input_template: str | None
    max_len: int

    def key(self, side: str) -> str:
        return self.chosen_key if side == "chosen" else self.rejected_key


def tokenize_preference(
    rows: "Dataset",
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
) -> tuple["Dataset", PreferenceLedger]:
    """Pairs in row order, and the ledger; cached on disk by rows, tokenizer and options.

    The prompt is a text or a list of messages, each answer a text or a list of messages behind it. Without a prompt
    column both answers are whole conversations that share all but their last message. Any list of messages, or
    apply_chat_template, means the chat template; else prompt (put into input_template), answer, eos. The mask is on the
    answer (its last turn). Each side is cut on the right to max_len tokens; a cut side gets no eos.

    Columns: {chosen,rejected}_ids (int32), {chosen,rejected}_mask (int8), margin (0 without margin_key), num_tokens (of
    both sides), num_loss_tokens (1: a preference loss is a mean over pairs), digest, row (index into `rows`).
    Raises UserError for keys that are absent and values of another kind (with the row, counted from 1).
    """
    if tokenizer.eos_token_id is None:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no answer could end")
    prompt_key = _find_prompt_key(prompt_key, rows.column_names)
    _check_keys(rows.column_names, flag, prompt_key, chosen_key, rejected_key, margin_key)
    is_list = any(isinstance(rows[0][key], list) for key in (prompt_key, chosen_key, rejected_key) if key)
    options = _Options(
        apply_chat_template or is_list, prompt_key, chosen_key, rejected_key, margin_key, input_template, max_len
    )
    if options.chat:
        chat_template(tokenizer)  # raises where there is none
    _check_template(options)
    pairs = map_cached(
        rows,
        _tokenize_row,
        folder="trainer_preference",
        key=[TOKENIZER_VERSION, tokenizer_state(tokenizer), dataclasses.asdict(options)],
        features=_features(),
        num_proc=num_proc,
        tokenizer=tokenizer,
        options=options,
        flag=flag,
    )
    return _keep(pairs, flag, max_len)


def _keep(pairs: "Dataset", flag: str, max_len: int) -> tuple["Dataset", PreferenceLedger]:
    facts = pairs.with_format("numpy").select_columns(["fate", "truncated", "num_tokens"])[:]
    fates = list(facts["fate"])
    kept = np.flatnonzero([fate == KEPT for fate in fates])
    ledger = PreferenceLedger(
        num_rows=len(pairs),
        num_identical=fates.count(IDENTICAL),
        num_empty=fates.count(EMPTY),
        num_cut_away=fates.count(CUT_AWAY),
        num_truncated=int(facts["truncated"].sum()),
        num_samples=len(kept),
        num_tokens=int(facts["num_tokens"][kept].sum()),
    )
    if not len(kept):
        raise UserError(flag, f"no pair is left ({ledger.summary()})", f"answers that fit into --max_len {max_len}")
    pairs = pairs.remove_columns(["fate", "truncated"])
    return (pairs if len(kept) == len(pairs) else pairs.select(kept)), ledger


def _find_prompt_key(prompt_key: str | None, columns: list[str]) -> str | None:
    return "prompt" if prompt_key is None and "prompt" in columns else prompt_key


def _check_keys(columns: list[str], flag: str, prompt_key, chosen_key, rejected_key, margin_key) -> None:
    keys = {
        "--prompt_key": prompt_key,
        "--chosen_key": chosen_key,
        "--rejected_key": rejected_key,
        "--margin_key": margin_key,
    }
    for key_flag, key in keys.items():
        if key is not None and key not in columns:
            raise UserError(key_flag, f"no key {key!r} in the rows of {flag}", ", ".join(columns))


def _check_template(options: _Options) -> None:
    if options.input_template is None:
        return
    if options.chat or options.prompt_key is None:
        raise UserError("--input_template", "does not go with a chat template or without a prompt", "leave it out")
    if options.input_template.count("{}") != 1:
        raise UserError("--input_template", f"{options.input_template.count('{}')} times {{}}", "exactly one {}")


def _features() -> "Features":
    from datasets import Features, List, Value

    ids = {f"{side}_ids": List(Value("int32")) for side in SIDES}
    masks = {f"{side}_mask": List(Value("int8")) for side in SIDES}
    numbers = {name: Value("int64") for name in ("num_tokens", "num_loss_tokens", "row")}
    others = {"margin": Value("float64"), "digest": Value("string"), "fate": Value("string")}
    return Features({**ids, **masks, **numbers, **others, "truncated": Value("bool")})


def _tokenize_row(row: Any, index: int, *, tokenizer: Any, options: _Options, flag: str) -> dict[str, Any]:
    try:
        sides = {side: _tokenize_side(row, side, tokenizer, options) for side in SIDES}
        margin = _margin(row, options.margin_key)
    except UserError as error:
        raise UserError(f"{flag} row {index + 1}: {error.where}", error.found, error.allowed) from None
    whole = {side: list(ids) for side, (ids, _) in sides.items()}
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
    result["num_tokens"] = len(result["chosen_ids"]) + len(result["rejected_ids"])
    result["digest"] = digest_of(result["chosen_ids"]) + digest_of(result["rejected_ids"])
    return result


def _margin(row: Any, key: str | None) -> float:
    if key is None:
        return 0.0
    if isinstance(row[key], bool) or not isinstance(row[key], (int, float)):
        raise UserError(f"--margin_key {key}", repr(row[key]), "a number")
    return float(row[key])


def _tokenize_side(row: Any, side: str, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    """(input_ids, loss_mask) of one side, uncut; the first token is never a target, since nothing predicts it."""
    input_ids, mask = (_chat_side if options.chat else _text_side)(row, side, tokenizer, options)
    return input_ids, [0, *mask[1:]]


def _text_side(row: Any, side: str, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    answer = text_of(row, f"--{side}_key", options.key(side))
    if options.prompt_key is None:  # whole texts on both sides; what they share cancels in every preference
        input_ids = with_eos(tokenizer, with_special_tokens(tokenizer, answer))
        return input_ids, [1 if answer.strip() else 0] * len(input_ids)
    prompt = text_of(row, "--prompt_key", options.prompt_key)
    if options.input_template is not None:
        prompt = options.input_template.replace("{}", prompt, 1)  # not str.format: the texts may hold braces
    prompt_ids = with_special_tokens(tokenizer, prompt)
    answer_ids = with_eos(tokenizer, tokenizer(answer, add_special_tokens=False)["input_ids"])
    return prompt_ids + answer_ids, [0] * len(prompt_ids) + [1 if answer.strip() else 0] * len(answer_ids)


def _chat_side(row: Any, side: str, tokenizer: Any, options: _Options) -> tuple[list[int], list[int]]:
    answer = _as_messages(row, f"--{side}_key", options.key(side), "assistant")
    if options.prompt_key is None:
        other = "rejected" if side == "chosen" else "chosen"
        if answer[:-1] != _as_messages(row, f"--{other}_key", options.key(other), "assistant")[:-1]:
            where = f"--{side}_key {options.key(side)}"
            raise UserError(where, "the conversations differ before their last message", "a shared prompt")
        prompt = []
    else:
        prompt = _as_messages(row, "--prompt_key", options.prompt_key, "user")
    messages = prompt + answer
    if not messages or messages[-1]["role"] != "assistant":
        raise UserError(f"--{side}_key {options.key(side)}", "does not end with an assistant message", "an answer")
    if not messages[-1]["content"].strip() and not messages[-1].get("tool_calls"):
        # an empty answer has no loss token: an earlier turn must not take its place
        return render_chat(tokenizer, messages[:-1], multiturn=False)[0], []
    return render_chat(tokenizer, messages, multiturn=False)


def _as_messages(row: Any, key_flag: str, key: str, role: str) -> list[dict]:
    if isinstance(row[key], str):
        return [{"role": role, "content": row[key]}]
    return messages_of(row[key], f"{key_flag} {key}")


def collate_pairs(samples: list[dict], pad_token_id: int, packed: bool) -> dict[str, torch.Tensor]:
    """A micro-batch of pairs for one forward pass: all chosen sides, then all rejected ones, padded or packed.

    Beside what `trainer.datasets.packing` gives, per token (rows, tokens): sequence_ids, the number of the sequence that
    the token belongs to (n pairs: chosen 0 to n - 1, rejected n to 2 n - 1), and is_last, 1 at a sequence's last token.
    Per pair (n,): margins. All survive a split over sequence-parallel ranks, so that sums per sequence do. No
    sample gives one token without target, is_last 0 and no pair.
    """
    sides = [
        {"input_ids": list(sample[f"{side}_ids"]), "loss_mask": list(sample[f"{side}_mask"])}
        for side in SIDES
        for sample in samples
    ]
    batch = (collate_packed if packed else collate_padded)(sides, pad_token_id=pad_token_id)
    batch["sequence_ids"] = torch.zeros_like(batch["input_ids"])
    batch["is_last"] = torch.zeros_like(batch["input_ids"])
    start = 0
    for number, side in enumerate(sides):
        row, first = (0, start) if packed else (number, 0)
        start += len(side["input_ids"])
        batch["sequence_ids"][row, first : first + len(side["input_ids"])] = number
        batch["is_last"][row, first + len(side["input_ids"]) - 1] = 1
    batch["margins"] = torch.tensor([float(sample["margin"]) for sample in samples])
    return batch


def render_pair(pair: dict[str, Any], tokenizer: Any) -> str:
    """Both sides of a pair, decoded, with what the loss looks at in [[ ]]."""
    sides = ({"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_mask"]} for side in SIDES)
    return "\n".join(f"{name}: {render_sample(side, tokenizer)}" for name, side in zip(SIDES, sides))

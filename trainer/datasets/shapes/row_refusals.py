"""Rows that are refused as a whole, with the true cause and the flag that helps."""

from collections.abc import Iterable

from trainer.datasets.conversations.messages import IGNORE
from trainer.datasets.rows import truth_value
from trainer.datasets.shapes.columns import (
    ANSWERS,
    BEFORE_ANSWER,
    CONVERSATIONS,
    LABELS,
    MORE_ANSWERS,
    OTHER_SETS,
    PROMPTS,
    Columns,
    plain_name,
)
from trainer.datasets.shapes.prompt_part import PromptPart, flag_of_inner
from trainer.errors import UserError

# names of conversations that are not read without a flag
MORE_CONVERSATIONS = ("message", "messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")
NEEDED = "--input_key and --output_key, --apply_chat_template (conversations) or --pretrain_mode (plain text)"


def needed(columns: Iterable[str]) -> str:
    """What would say what to learn from these columns: flags with those whose names are known ones in another spelling."""
    named = {plain_name(name): name for name in reversed(list(columns))}
    conversation = next((named[name] for name in MORE_CONVERSATIONS if name in named), None)
    if conversation:
        return f"--input_key {conversation} --apply_chat_template for a list of messages; {NEEDED}"
    question, answer = (
        next((named[name] for name in map(plain_name, names) if name in named), None)
        for names in ((*PROMPTS, "input", "user", "human"), (*ANSWERS, "assistant", "gpt"))
    )
    return f"--input_key {question} --output_key {answer}; {NEEDED}" if question and answer else NEEDED


def refuse_other_sets(columns: Iterable[str], where: str = "") -> None:
    """Raise UserError for the columns of a public set whose rows are not read as they are. `where` is its flag."""
    for names, rows in OTHER_SETS.items():
        if set(names) <= set(columns):
            raise UserError(f"{where} columns {', '.join(names)}".strip(), "rows of this shape are not read", rows)


def no_question(columns: Columns, answer: str | None) -> UserError:
    """The error of a row with the column `answer` and without a question."""
    empty = [name for name in BEFORE_ANSWER if name in columns.names]
    found = "no value" if empty else f"no question to the answer in {answer}"
    where = f"column{'s' * (len(empty) > 1)} {', '.join(empty)}" if empty else "its columns"
    return UserError(where, found, "a question before each answer")


def no_answer(columns: Columns, prompt: PromptPart, chat: bool | None) -> UserError:
    """The error of a row for train_sft in which nothing is known as an answer. `chat`: texts become turns."""
    if chat and prompt.value is not None:
        return UserError(prompt.where, "a text, not a list of messages", "--output_key for the answer to the text")
    conversation = next((name for name in CONVERSATIONS if name in columns.names), None)
    if conversation and prompt.value is None and (conversation in columns.empty or not columns.row):
        return UserError(f"--input_key {conversation}", "no value", "a list of messages")
    refuse_other_sets(columns.row)
    wanted = ("text",) if prompt.value is None else ANSWERS
    missing = next((name for name in wanted if name in columns.names and name not in columns.row), None)
    if missing:
        return UserError(f"column {missing}", "no value", "a text")
    pairs = "train_dpo or train_rm for pairs; " if {"chosen", "rejected"} & set(columns.row) else ""
    found = f"nothing says what to learn from the columns {', '.join(columns.row or columns.names)}"
    inner = flag_of_inner(columns.row, "--input_key")
    return UserError(prompt.where or "its columns", found, inner or pairs + needed(columns.row))


def waiting_turns(columns: Columns, name: str) -> UserError:
    """The error of a row for train_sft whose only turns, in the column `name`, wait for an answer."""
    refuse_other_sets(columns.row)
    found = "its last turn has no answer, and no name of a column says which one is"
    return UserError(f"column {name}", found, "--output_key with one of the columns")


def refuse_answer_beside_text(columns: Columns) -> None:
    """Raise UserError for an answer that is no part of the text: the text may be its question."""
    if (answer := columns.filled((*ANSWERS, *MORE_ANSWERS))) and str(columns.row[answer]).strip() not in str(
        columns.row["text"]
    ):
        found = f"a whole text, or the question to {answer}"
        raise UserError("column text", found, f"--input_key text --output_key {answer}, or {IGNORE} {answer}")


def refuse_verdict(columns: Columns, answers: tuple[str, ...]) -> None:
    """Raise UserError for a column that says whether the answer is good. `answers` are columns that a flag names as the answer."""
    for name in LABELS:
        if truth_value(columns.row.get(name)) is not None and name not in (*columns.taken, *answers):
            found = "says whether the answer is good, which is not used here"
            raise UserError(f"column {name}", found, f"train_dpo --loss kto, or {IGNORE} {name}")

"""Columns whose name is a known one in another spelling, such as `Prompt`; and names that may be those of a prompt."""

import re
from collections.abc import Iterable
from typing import Any

from trainer.datasets.conversations.messages import IGNORE
from trainer.datasets.shapes.columns import (
    ANSWERS,
    CHOSEN,
    CONVERSATIONS,
    EMPTY,
    LABELS,
    PROMPTS,
    REJECTED,
    Columns,
    plain_name,
)
from trainer.errors import UserError

KNOWN = {plain_name(name): name for name in (*CONVERSATIONS, *PROMPTS, *ANSWERS, *CHOSEN, *REJECTED, *LABELS)}
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
# fmt: off
ASK = {
    "prompt", "prompts", "question", "questions", "instruction", "query", "problem", "input", "inputs", "request", "user",
    "human", "message", "messages", "conversation", "dialog", "dialogue", "chat", "post", "task", "text", "ask",
}
# words of names that say something of a prompt
FACTS = {
    "id", "ids", "uid", "uuid", "type", "kind", "source", "origin", "category", "name", "lang", "language", "level",
    "model", "count", "num", "idx", "index", "length", "len", "hash", "sha", "url", "tokens", "score", "rating", "date",
    "time", "version", "title", "tag", "tags", "topic", "split", "dataset", "template", "format", "metadata", "meta",
    "difficulty",
}
# fmt: on


def with_known_names(rows: Any, named: Iterable[str | None]) -> tuple[Any, tuple[str, ...]]:
    """The rows with the known names of columns in another spelling, and what was renamed, for the notes of a row.

    Columns in `named`, which flags name, keep their names. So do two that could have one name.
    """
    columns = rows.column_names
    plain = [plain_name(name) for name in columns]
    kept = {key.split(".")[0] for key in named if key}
    said = []
    for name, spelled in zip(columns, plain):
        known = KNOWN.get(spelled)
        if known and name != known and name not in kept and plain.count(spelled) == 1:
            rows = rows.rename_column(name, known)
            said.append(f"column {name} is read as {known}")
    return rows, tuple(said)


def refuse_unknown_prompt(columns: Columns, texts: list[str]) -> None:
    """Raise UserError for a column that may be the prompt of answers that have none. `texts` are those of the answers."""
    for name, value in columns.row.items():
        words = {word.lower() for word in WORDS.findall(name)}
        if name in columns.used | columns.taken or not words & ASK or words & FACTS or value in EMPTY:
            continue
        is_part = isinstance(value, str) and all(value.strip() in text for text in texts)
        if isinstance(value, (str, list, dict)) and not is_part:
            found = "may be the prompt, and is not used"
            raise UserError(f"column {name}", found, f"--prompt_key {name}, or {IGNORE} {name}")

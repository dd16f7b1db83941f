"""Texts that hold a whole conversation, as in Anthropic's hh: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""

import re
from typing import Any

MARK = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(value: Any) -> bool:
    """Whether a text begins with a turn of the human and ends with one of the assistant."""
    if not isinstance(value, str) or not value.startswith("\n\nHuman:"):
        return False
    return MARK.findall(value)[-1] == "Assistant"


def is_cut_transcript(value: Any) -> bool:
    """Whether a text begins with a turn of the human and has one of the assistant, but does not end with one."""
    is_text = isinstance(value, str) and value.startswith("\n\nHuman:") and "\n\nAssistant:" in value
    return is_text and not is_transcript(value)


def turns_before_answer(value: Any) -> list[dict] | None:
    """The messages of a transcript that ends with the mark of the assistant, without a text behind it."""
    text = f"\n\n{value.strip()}" if isinstance(value, str) else ""
    if not is_transcript(text):
        return None
    *turns, last = turns_of(text)
    return None if last["content"] else turns


def turns_of(text: str) -> list[dict]:
    """The messages of a transcript. Nothing but the marks and white space at the ends of turns is left out."""
    _, *parts = MARK.split(text)
    return [{"role": ROLES[name], "content": turn.strip()} for name, turn in zip(parts[::2], parts[1::2])]

"""Answers of an environment that are too long: the episode ends, or parts of their texts are left out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

LEFT_OUT = "\n[...]\n"  # in place of what is left out


@dataclass(frozen=True)
class LongAnswers:
    """When an answer is too long, and what is kept of its texts: "start", "end" or "both". With "none", the episode ends."""

    keep: str = "none"
    max_len: Optional[int] = None  # tokens of an answer; None: as many as have room


def fitting(
    render: Callable[[list[dict]], list[int]], messages: list[dict], room: int, long: LongAnswers
) -> tuple[list[int], bool]:
    """(ids of `messages`, whether they were cut). No ids if they cannot fit.

    `render(messages)` gives the ids. `room` is the number of tokens left in the episode, and the next turn needs one. An
    answer that is cut takes at most half of them. Each text keeps the same number of characters, the largest that fits.
    """
    ids, most = render(messages), min(room - 1, room if long.max_len is None else long.max_len)
    if len(ids) <= most:
        return ids, False
    most = min(most, room // 2)
    low, high, found = 0, max(len(_text(message)) for message in messages) - 1, []
    while low <= high and long.keep != "none":
        middle = (low + high) // 2
        cut = [{**m, "content": shortened(_text(m), middle, long.keep)} if _text(m) else m for m in messages]
        ids = render(cut)
        if len(ids) <= most:
            found, low = ids, middle + 1
        else:
            high = middle - 1
    return found, bool(found)


def _text(message: dict) -> str:
    return message["content"] if isinstance(message.get("content"), str) else ""


def shortened(text: str, count: int, keep: str) -> str:
    """`count` characters of the start, of the end, or half of them of each. The rest is LEFT_OUT."""
    if len(text) <= count:
        return text
    start = {"start": count, "end": 0, "both": count - count // 2}[keep]
    return text[:start] + LEFT_OUT + text[len(text) - (count - start) :]

"""Marks of images in the messages of a row: <image> in a text, or a part {"type": "image"}. One mark is one image."""

from typing import Any

from trainer.datasets.files.image_files import COLUMN, SOURCES_OF_PARTS
from trainer.errors import UserError

MARK = "￼"  # stands for an image in the text of a message until the template is rendered
MARK_IN_ROWS = "<image>"


def with_marks(row: Any, sides: list[list[str]], answers: list[str], num_images: int) -> dict[str, Any]:
    """The row whose messages are texts, with MARK for each image. {"type": "image"} and <image> both become MARK.

    Each of `sides` are the columns of one conversation. It must have one mark for each of the row's images. A text in
    one of the columns `answers` is the assistant's, and has none. Raises UserError that names the column.
    """
    marked = {name: _marked(row[name], name) for name in dict.fromkeys(name for side in sides for name in side)}
    for name in answers:
        if isinstance(marked[name], str) and MARK in marked[name]:
            raise _in_answer(name)
    for side in sides:
        num_marks = sum(_count(marked[name]) for name in side)
        if num_marks != num_images:
            found = f"{num_marks} marks for {num_images} images"
            raise UserError(f"column {COLUMN}", found, 'one <image>, or one part {"type": "image"}, for each image')
    return {**row, **marked}


def _in_answer(name: str) -> UserError:
    return UserError(f"column {name}", "an image in an answer", "images in the other messages")


def _count(value: Any) -> int:
    """The number of marks in a text, or in a list of messages."""
    texts = [value]
    if isinstance(value, list):
        texts = [message.get("content", message.get("value")) for message in value if isinstance(message, dict)]
    return sum(text.count(MARK) for text in texts if isinstance(text, str))


def _marked(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value.replace(MARK_IN_ROWS, MARK)
    if not isinstance(value, list):
        return value
    return [_marked_message(message, name) for message in value]


def _marked_message(message: Any, name: str) -> Any:
    if not isinstance(message, dict):
        return message  # `messages_of` refuses it later
    key = "value" if "from" in message and "role" not in message else "content"
    content = message.get(key)
    if isinstance(content, list):
        content = "".join(_part(part, name) for part in content)
    elif isinstance(content, str):
        content = content.replace(MARK_IN_ROWS, MARK)
    if message.get("role", message.get("from")) in ("assistant", "gpt") and MARK in (content or ""):
        raise _in_answer(name)
    return {**message, key: content}


def _part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind not in ("image", "image_url"):
        raise UserError(f"column {name}", f"a part of type {kind!r} in a message", "text, image")
    if any(part.get(source) for source in SOURCES_OF_PARTS):
        raise UserError(f"column {name}", "an image inside a message", f"its path in the column {COLUMN}")
    return MARK

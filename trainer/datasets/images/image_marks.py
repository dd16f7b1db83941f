"""Marks of images in the messages of a row: <image> in a text, or a part {"type": "image"}. One mark is one image."""

from typing import Any

from trainer.datasets.conversations.messages import TEXT_PARTS, role_of, text_of_part
from trainer.datasets.files.image_files import COLUMN, SOURCES_OF_PARTS
from trainer.datasets.shapes.notes import Notes
from trainer.datasets.shapes.read_row import ReadRow
from trainer.errors import UserError
from trainer.metrics import counted

MARK = "￼"  # stands for an image in the text of a message until the template is rendered
MARK_IN_ROWS = "<image>"


def with_marks(row: ReadRow, answers: tuple[str, ...], num_images: int) -> ReadRow:
    """The row whose messages are texts, with MARK for each image. {"type": "image"} and <image> both become MARK.

    The prompt and each of the parts `answers` are one conversation. It must have one mark for each of the row's images.
    Rows without any mark (TRL) have their images before the text of the first user message. An answer that is a text
    has no mark. Raises UserError that names the column.
    """
    if row.get("text") is not None and num_images:
        raise UserError(f"column {COLUMN}", "an image beside a text without turns", "conversations")
    names = [name for name in ("prompt", *answers) if row.get(name) is not None]
    marked = {name: _marked(row[name], _column(row, name), row.notes) for name in names}
    for name in answers:
        if isinstance(marked.get(name), str) and MARK in marked[name]:
            raise _in_answer(_column(row, name))
    counts = {name: _count(value) for name, value in marked.items()}
    if num_images and not any(counts.values()):
        marked |= {name: _opened(value, num_images) for name, value in marked.items() if _has_user(name, value)}
        counts = {name: _count(value) for name, value in marked.items()}
        row.notes.facts.add("images of rows without <image> are put before the first message of the user")
    for side in [["prompt", name] for name in answers] or [["prompt"]]:
        num_marks = sum(counts.get(name, 0) for name in side)
        if num_marks != num_images:
            found = f"{counted(num_marks, 'mark')} for {counted(num_images, 'image')}"
            raise UserError(f"column {COLUMN}", found, 'one <image>, or one part {"type": "image"}, for each image')
    return row.with_parts(marked)


def _column(row: ReadRow, name: str) -> str:
    """The column of a part, from the place that errors name: `--input_key messages`."""
    return row.where[name].split(" ")[-1]


def _in_answer(name: str) -> UserError:
    return UserError(f"column {name}", "an image in an answer", "images in the other messages")


def _count(value: Any) -> int:
    """The number of marks in a text, or in a list of messages."""
    texts = [value]
    if isinstance(value, list):
        texts = [message.get("content", message.get("value")) for message in value if isinstance(message, dict)]
    return sum(text.count(MARK) for text in texts if isinstance(text, str))


def _has_user(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return name == "prompt"
    return isinstance(value, list) and any(isinstance(m, dict) and role_of(m) == "user" for m in value)


def _opened(value: Any, num_images: int) -> Any:
    """The text, or the first message of the user, with the marks of all images before it."""
    if isinstance(value, str):
        return MARK * num_images + value
    first = next(number for number, message in enumerate(value) if role_of(message) == "user")
    message = value[first]
    key = _key(message)
    return [*value[:first], {**message, key: MARK * num_images + str(message.get(key) or "")}, *value[first + 1 :]]


def _key(message: dict) -> str:
    return "value" if message.get("from") is not None and message.get("role") is None else "content"


def _marked(value: Any, name: str, notes: Notes) -> Any:
    if isinstance(value, str):
        return value.replace(MARK_IN_ROWS, MARK)
    if not isinstance(value, list):
        return value
    return [_marked_message(message, name, notes) for message in value]


def _marked_message(message: Any, name: str, notes: Notes) -> Any:
    if not isinstance(message, dict):
        return message  # `messages_of` refuses it later
    key = _key(message)
    content = message.get(key)
    if isinstance(content, list):
        content = "".join(_part(part, name, notes) for part in content)
    elif isinstance(content, str):
        content = content.replace(MARK_IN_ROWS, MARK)
    if role_of(message) == "assistant" and MARK in (content or ""):
        raise _in_answer(name)
    return {**message, key: content}


def _part(part: Any, name: str, notes: Notes) -> str:
    kind, where = part.get("type", "text") if isinstance(part, dict) else None, f"column {name}"
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return text_of_part(part, where, notes)
    if kind not in ("image", "image_url"):
        raise UserError(where, f"a part of type {kind!r} in a message", "text, image")
    if any(part.get(source) for source in SOURCES_OF_PARTS):
        raise UserError(where, "an image inside a message", f"its path in the column {COLUMN}")
    if part.get("text"):
        raise UserError(where, "a text in a part of an image", "a part of its own for the text")
    text_of_part({**part, "text": ""}, where, notes)  # what else the part has
    return MARK

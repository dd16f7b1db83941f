"""The columns of one row: known names, which of them were used, and what is left over."""

from typing import Any

from trainer.datasets.conversations.messages import IGNORE
from trainer.datasets.files.image_files import COLUMN as IMAGES
from trainer.datasets.files.image_files import FOLDER
from trainer.datasets.rows import column_of_key, lookup
from trainer.datasets.shapes.notes import Notes
from trainer.errors import UserError

PROMPTS = ("instruction", "question", "query", "problem", "prompt")
ANSWERS = ("output", "response", "completion", "answer", "solution")
CONVERSATIONS = ("messages", "conversations", "conversation")
MORE = ("input", "context")  # a second text of the user's turn
SYSTEMS = ("system", "system_prompt", "system_message")
HISTORY, TOOLS = "history", "tools"
CHOSEN, REJECTED = ("chosen", "chosen_response"), ("rejected", "rejected_response", "rejected_messages")
# columns that add to a text: they are used or refused
ADDED = (*SYSTEMS, *MORE, HISTORY, TOOLS, "functions", "documents", "image", IMAGES)
ADDED += ("video", "videos", "audio", "audios", "speech", "objects", "thinking", "reasoning_content")
ADDED += ("chat_template_kwargs",)
EMPTY = (None, "", [], {}, "[]", "{}", "null")
UNSEEN = (FOLDER,)  # our own columns


class Columns:
    """The columns of a row that have a value. `used` fills up while the row is read."""

    def __init__(self, row: Any, ignored: tuple[str, ...] = (), taken: tuple[str, ...] = ()):
        hidden = {*UNSEEN, *ignored}
        self.names = [name for name in row if name not in hidden]
        self.row = {name: value for name, value in row.items() if name not in hidden and value is not None}
        self.used: set[str] = set()
        self.taken = {column_of_key(self.row, key) for key in taken}  # something else reads them

    def take(self, key: str) -> Any:
        self.used.add(column_of_key(self.row, key) or key)
        return lookup(self.row, key)

    def find(self, names: tuple[str, ...], flag: str = "") -> str | None:
        """The name that has a value. An empty one counts if no other is there. Raises UserError for two values."""
        there = [name for name in names if name in self.row and name not in self.used]
        filled = [name for name in there if self.row[name] not in EMPTY]
        if len({repr(self.row[name]) for name in filled}) > 1:
            raise UserError(f"columns {' and '.join(filled)}", "each could be meant", f"{flag} with one of them")
        self.used |= set(filled[1:])  # the same text twice
        return next(iter(filled or there), None)

    def filled(self, names: tuple[str, ...]) -> str | None:
        """The first name with a value that is not empty and not used yet."""
        hidden = self.used | self.taken
        return next((name for name in names if name not in hidden and self.row.get(name) not in EMPTY), None)

    def finish(self, notes: Notes, known_text: str = "", *, strict: bool = True) -> None:
        """Note the columns that were not used. If `strict`, raises UserError for one that would change the text.

        A column whose text is in `known_text`, the text of the conversation, adds nothing.
        """
        for name, value in self.row.items():
            if name in self.used | self.taken or (name in ADDED and value in EMPTY):
                continue
            if strict and name in ADDED and not (isinstance(value, str) and value in known_text):
                raise UserError(f"column {name}", "would change the text, and is not used here", f"{IGNORE} {name}")
            notes.columns.add(name)

"""A row that was read: a prompt and its answers, as texts or as messages."""

from typing import Any

from trainer.datasets.conversations.messages import messages_of
from trainer.datasets.files.image_files import COLUMN as IMAGES
from trainer.datasets.files.image_files import FOLDER
from trainer.datasets.shapes.columns import TEMPLATE_ARGS
from trainer.datasets.shapes.notes import Notes


class ReadRow(dict):
    """A row that was read. Its keys are the parts: prompt, the answers, text, tools, images. None: the row has none.

    A value is a text, or a list of messages as the file has them. `where` names each part for errors. `columns` is the
    row as it was. `trained`: whether its answer has a loss.
    """

    def __init__(
        self, parts: dict, columns: Any, where: dict[str, str], chat: bool, notes: Notes, trained: bool = True
    ):
        super().__init__(parts)
        self.columns, self.where, self.chat, self.notes, self.trained = columns, where, chat, notes, trained

    def with_parts(self, parts: dict) -> "ReadRow":
        return ReadRow({**self, **parts}, self.columns, self.where, self.chat, self.notes, self.trained)

    def data(self) -> list[Any]:
        """The texts and messages of all parts."""
        return [value for name, value in self.items() if name not in (FOLDER, IMAGES, TEMPLATE_ARGS)]

    def texts(self) -> list[Any]:
        """The texts and messages that are data. A text that becomes a turn of the assistant is the model's own."""
        turns = [name for name, value in self.items() if self.chat and isinstance(value, str) and name != "tools"]
        kept = [name for name in self if name not in (FOLDER, IMAGES, TEMPLATE_ARGS, *turns)]
        return [self[name] for name in kept] + [{"content": self[name]} for name in turns if name == "prompt"]

    def messages(self, part: str, role: str, template: str | None) -> list[dict]:
        """The messages of a part. A text is one message of `role`; no value is no message. See `messages_of`."""
        value = self.get(part)
        if value is None:
            return []
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        return messages_of(value, self.where[part], self.notes, template)

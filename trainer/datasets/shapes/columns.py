"""The columns of one row: known names, which of them were used, and what is left over."""

import re
from collections.abc import Iterator
from typing import Any

from trainer.datasets.conversations.messages import IGNORE, MORE_THOUGHTS, THOUGHTS
from trainer.datasets.files.image_files import COLUMN as IMAGES
from trainer.datasets.files.image_files import FOLDER
from trainer.datasets.rows import column_of_key, lookup
from trainer.datasets.shapes.loss_columns import FLAGS, refuse_loss_column
from trainer.datasets.shapes.notes import Notes
from trainer.errors import UserError

PROMPTS = ("instruction", "question", "query", "problem", "inputs", "prompt")
ANSWERS = ("output", "response", "completion", "answer", "solution", "targets")
MORE_ANSWERS = ("final_answer", "generation")  # if no other name has a value: DeepMath, distilabel
CALLS = "answers"  # xlam: a list of calls
CONVERSATIONS = ("messages", "conversations", "conversation")
MORE = ("input", "context")  # a second text of the user's turn, or the only one
DATA = "data"  # UltraChat: texts in turn
BEFORE_ANSWER = (*CONVERSATIONS, *PROMPTS, *MORE, DATA)
SYSTEMS = ("system", "system_prompt", "system_message")
HISTORY, TOOLS = "history", ("tools", "functions")
CHOSEN = ("chosen", "chosen_response", "preferred_output")
REJECTED = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
BESIDE_ANSWER = "rejected_response"  # ms-swift: then an answer is the chosen one
LABELS = ("label", "kto_tag")  # true for a good answer
# columns that say the same as LABELS, without case and underscores: see `plain_name`
VERDICTS = (
    "label", "labels", "ktotag", "desirable", "isdesirable", "preferred", "ispreferred", "good", "isgood",
    "thumbsup",
)  # fmt: skip
WRITE_PAIRS = "rows of prompt, chosen and rejected"
# columns of public sets whose rows are not read as they are, and the rows to write
OTHER_SETS = {
    (
        "system",
        "chat",
    ): "rows of messages: the turns of chat, with each <functioncall> as tool_calls and tools from system",
    ("prompt", "answers"): f"{WRITE_PAIRS}: an answer of a better rank and one of a worse",
    ("response_1", "response_2"): f"{WRITE_PAIRS}: the better response is the one that preference_strength names",
    ("response1", "response2"): f"{WRITE_PAIRS}: the better response is the one that overall_preference names",
    ("conversation_a", "conversation_b", "winner"): f"{WRITE_PAIRS}: the conversation that winner names is chosen",
    ("response_a", "response_b"): f"{WRITE_PAIRS}: the better response is chosen",
    ("question", "answers"): "rows of question and answer, with one of the answers",
}
# columns that change the text, or what is learned from it: they are used or refused
ADDED = (
    *SYSTEMS, *MORE, HISTORY, *TOOLS, *THOUGHTS, *MORE_THOUGHTS,
    "documents", "article", "passage", "choices", "options", "role", "instructions", "system_instruction",
    "system_instructions", "document", "contexts", "passages", "support", "evidence", "hint", "hints", "starter_code",
    "knowledge", "background", "facts", "table", "schema", "rationale", "thought_process", "prefix", "suffix",
    *"ABCD", *(f"{name}{letter}" for name in ("choice_", "option_", "op") for letter in "abcd"),
)  # fmt: skip
ADDED += ("image", IMAGES, "video", "videos", "audio", "audios", "speech", "objects", "chosen_images")
ADDED += ("image_url", "image_urls", "image_path", "video_path", "audio_path")
TEMPLATE_ARGS = "chat_template_kwargs"  # of a row, as in TRL
ADDED += ("rejected_images", TEMPLATE_ARGS)
EMPTY = (None, "", [], {}, "[]", "{}", "null")
MARKS = ("<image>", "<video>", "<audio>")  # in texts of rows that have such a column
SIDE, ROW = "(side)", "(row)"  # of a row made from a pair: chosen or rejected, and the number of the pair's row
UNSEEN = (FOLDER, SIDE, ROW)  # our own columns


def plain_name(name: str) -> str:
    """A name without case, hyphens, underscores and spaces: systemPrompt is system_prompt."""
    return re.sub(r"[-_\s]", "", name).lower()


SPELLINGS = {plain_name(name): name for name in reversed((*ADDED, *FLAGS)) if len(name) > 1}


def _has_value(name: str, value: Any) -> bool:
    """Whether a column has a value. A conversation without messages is none."""
    if name in CONVERSATIONS and value in EMPTY:
        return False
    no_turns = value == [] or (isinstance(value, dict) and all(child in (None, []) for child in value.values()))
    return value is not None and not (name in (*CONVERSATIONS, *PROMPTS) and no_turns)


class Columns:
    """The columns of a row that have a value. `used` fills up while the row is read."""

    def __init__(self, row: Any, ignored: tuple[str, ...] = (), taken: tuple[str, ...] = ()):
        hidden = {*UNSEEN, *ignored}
        self.side = row.get(SIDE)
        self.names = [name for name in row if name not in hidden]
        self.row = {name: value for name, value in row.items() if name not in hidden and _has_value(name, value)}
        self.empty = {name for name in self.names if row[name] is not None} - self.row.keys()  # conversations
        self.used: set[str] = set()
        self.keys = set(taken)  # that were read; one may be inside an object
        self.taken = {column_of_key(self.row, key) for key in taken}  # something else reads them
        self.ignored = ignored

    def take(self, key: str) -> Any:
        self.used.add(column_of_key(self.row, key) or key)
        self.keys.add(key)
        return lookup(self.row, key)

    def find(self, names: tuple[str, ...], flag: str = "") -> str | None:
        """The name that has a value. An empty one counts if no other is there. Raises UserError for two values."""
        there = [name for name in names if name in self.row and name not in self.used]
        filled = [name for name in there if self.row[name] not in EMPTY]
        if len({repr(self.row[name]) for name in filled}) > 1:
            raise UserError(
                f"columns {' and '.join(filled)}", "each could be meant", f"{flag or IGNORE} with one of them"
            )
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
        for name, value in self._left():
            kind = name.rpartition(".")[2]
            known = kind if kind in ADDED else SPELLINGS.get(plain_name(kind))
            if known and value in EMPTY:
                continue
            refuse_loss_column(name, known or kind, value)
            is_neutral = known in FLAGS or (isinstance(value, str) and value in known_text)
            if strict and known and not is_neutral:
                renamed = "" if known == kind else f"the name {known}, or "
                found = "would change the text, and is not used here"
                raise UserError(f"column {name}", found, f"{renamed}{IGNORE} {name}")
            notes.columns.add(name)

    def _left(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of what was not read. `a.b` is the key b of an object a of which another key was read."""
        for name, value in self.row.items():
            if name not in self.used | self.taken:
                yield name, value
            elif name not in self.keys and isinstance(value, dict):
                read = {key.split(".")[1] for key in self.keys if key.startswith(f"{name}.")}
                inside = {f"{name}.{key}": child for key, child in value.items() if read and key not in read}
                yield from ((n, v) for n, v in inside.items() if v is not None and n not in self.ignored)

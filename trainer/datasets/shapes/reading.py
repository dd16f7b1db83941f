"""How the rows of a set are read, and the pieces that every kind of row has: a prompt, an answer, turns or texts."""

from dataclasses import dataclass
from typing import Any

from trainer.datasets.conversations.messages import role_of
from trainer.datasets.rows import text_value
from trainer.datasets.shapes.columns import CALLS, Columns
from trainer.datasets.shapes.notes import Notes
from trainer.datasets.shapes.prompt_part import (
    PromptPart,
    calls_of,
    is_json_of_messages,
    is_transposed,
    prompt_part,
    raw_messages,
)
from trainer.datasets.shapes.transcripts import is_transcript, turns_before_answer, turns_of
from trainer.errors import UserError

RENDERED = "prompts that are rendered by the chat template already stay texts; --read_control_tokens keeps their control tokens"
TRANSCRIPTS = "Human: and Assistant: in the texts begin turns of a conversation"


@dataclass(frozen=True)
class Reading:
    """The columns that flags name, and what the tokenizer allows."""

    task: str
    prompt_key: str | None = None
    answer_keys: tuple[str, ...] = ()  # sft: of the answer, if named; pairs: chosen, rejected; answer: of its answer
    prompt_flag: str = "--input_key"
    answer_flags: tuple[str, ...] = ()
    pair_keys: tuple[str, ...] = ()  # answer: of the two answers of a row that is a pair
    ignored: tuple[str, ...] = ()  # columns and keys of messages that --ignore_columns names
    taken: tuple[str, ...] = ()  # columns that something else reads: a label, a margin, a reward
    system: str | None = None  # of conversations that have none: --system
    chat: bool | None = None  # whether texts become messages; None: where the shape and the tokenizer allow it
    pretrain: bool = False  # --pretrain_mode
    has_template: bool = True  # of the tokenizer
    input_template: bool = False  # --input_template
    openings: tuple[str, ...] = ()  # a prompt that begins with one is rendered already: see `openings_of`
    drop_answer: bool = False  # of prompts that end with one
    renamed: tuple[str, ...] = ()  # what was said of columns in another spelling
    narrow: tuple[str, ...] = ()  # columns of numbers with fewer than 64 bits

    @property
    def makes_turns(self) -> bool:
        """Whether a prompt and its answers that are texts become turns without --apply_chat_template."""
        return self.has_template and not self.input_template and self.prompt_key is None


@dataclass
class Found:
    """What a row was read as."""

    name: str
    parts: dict[str, Any]
    where: dict[str, str]
    says: list[tuple[str, str]]  # (columns, what they become)
    chat: bool = False


def prompt_of(reader: Reading, columns: Columns, notes: Notes) -> PromptPart:
    """What comes before the answer. A transcript that waits for one is a conversation where texts become turns."""
    prompt = prompt_part(columns, reader.prompt_key, reader.prompt_flag)
    if reader.makes_turns and (turns := turns_before_answer(prompt.value)):
        prompt.value, prompt.is_chat, prompt.is_transcript = turns, True, True
        prompt.says = [(prompt.names, "turns")]
        notes.facts.add(TRANSCRIPTS)
    return prompt


def after(prompt: PromptPart, answer: Any) -> Any:
    """The answer to a prompt. That to a transcript is without white space at its ends, or the whole transcript again."""
    if not prompt.is_transcript or not isinstance(answer, str):
        return answer
    whole = f"\n\n{answer.strip()}"
    return turns_of(whole) if is_transcript(whole) else answer.strip()


def answer_of(reader: Reading, columns: Columns, key: str, where: str) -> Any:
    """The answer in a column. Calls of tools may stand there alone."""
    value = columns.take(key)
    calls = calls_of(value) if key == CALLS else None
    return calls or answer_value(value, where, key in reader.narrow)


def answer_value(value: Any, where: str, narrow: bool = False) -> Any:
    """An answer: a text, the text of a number, or raw messages. `narrow`: see `text_value`."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        raise UserError(where, "a list of texts", "one text, or messages")
    if isinstance(value, list) or (isinstance(value, dict) and (role_of(value) or is_transposed(value))):
        return raw_messages(value)
    if is_json_of_messages(value):
        return raw_messages(value)
    return text_value(value, where, numbers=True, narrow=narrow)


def has_turns(reader: Reading, prompt: PromptPart, notes: Notes) -> bool:
    """Whether a prompt and its answers are messages: a flag says so, or the prompt is a text that no flag named."""
    if reader.chat or prompt.is_chat or prompt.value is None or not reader.makes_turns:
        return bool(reader.chat) or prompt.is_chat
    if not prompt.value.startswith(reader.openings):
        return True
    notes.facts.add(RENDERED)
    return False

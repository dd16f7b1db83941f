"""Read a row of any known shape as the parts of a sample: a prompt and its answers, as texts or as messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.comma_separated import names_in
from trainer.datasets.conversations.messages import messages_of, role_of
from trainer.datasets.files.image_files import COLUMN as IMAGES
from trainer.datasets.files.image_files import FOLDER
from trainer.datasets.rows import narrow_columns, text_value
from trainer.datasets.shapes.answer_rows import ENDS_WITH_ANSWER, read_answer, read_pair
from trainer.datasets.shapes.columns import (
    ANSWERS,
    BEFORE_ANSWER,
    CALLS,
    EMPTY,
    HISTORY,
    MARKS,
    MORE,
    MORE_ANSWERS,
    SYSTEMS,
    TEMPLATE_ARGS,
    TOOLS,
    Columns,
)
from trainer.datasets.shapes.loss_columns import is_trained
from trainer.datasets.shapes.notes import Notes, summed
from trainer.datasets.shapes.prompt_part import (
    PromptPart,
    all_text,
    calls_of,
    flag_of_inner,
    has_name,
    is_answer,
    without_keys,
)
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.reading import RENDERED, Found, Reading, after, answer_of, has_turns, prompt_of
from trainer.datasets.shapes.row_refusals import (
    no_answer,
    no_question,
    refuse_answer_beside_text,
    refuse_verdict,
    waiting_turns,
)
from trainer.errors import UserError

SFT, PAIRS, ANSWER, PROMPT = "sft", "pairs", "answer", "prompt"  # what a row is read for
AS_TEXTS = "no chat template is applied: texts are joined as they are. --apply_chat_template makes them turns of a conversation"


@dataclass(frozen=True)
class RowReader(Reading):
    """How the rows of a set are read: the columns that flags name, and what the tokenizer allows. See `reader_of`."""

    def read(self, row: Any) -> ReadRow:
        """The parts of a row. Raises UserError that names the column for a row that cannot be read as a whole."""
        if isinstance(row, ReadRow):
            return row
        columns, notes = Columns(row, self.ignored, self.taken), Notes()
        notes.facts |= set(self.renamed)
        found = _READERS[self.task](self, columns, notes)
        notes.left_out |= {name for name in self.ignored if has_name(row, columns, name)}
        parts = {name: without_keys(value, self.ignored) for name, value in found.parts.items()}
        chat = found.chat or any(isinstance(value, list) for value in parts.values())
        if self.system is not None:
            parts = _with_system(parts, self.system, chat, notes)
        if isinstance(found.parts.get("prompt"), str) and not found.parts["prompt"].strip():
            notes.facts.add(summed("WARNING: {:row has|rows have} a prompt without a word, used as it is"))
        if chat:
            for part, names in (("tools", TOOLS), (IMAGES, (IMAGES,))):
                name = columns.find(names)
                parts[part] = columns.take(name) if name else None
                if parts[part] not in EMPTY:
                    found.says.append((name, part))
            if columns.filled((TEMPLATE_ARGS,)):
                parts[TEMPLATE_ARGS] = columns.take(TEMPLATE_ARGS)
                found.says.append((TEMPLATE_ARGS, "arguments of the chat template"))
        elif RENDERED not in notes.facts and self.has_template and "text" not in parts:
            notes.facts.add(AS_TEXTS)
        text = "\n".join(map(all_text, parts.values()))
        if parts.get(IMAGES) in EMPTY:
            notes.marks |= {mark for mark in MARKS if mark in text}
        trained = self.task != SFT or is_trained(columns, notes)
        columns.finish(notes, text, strict=not self.pretrain)
        as_text = {} if chat else {"user": "prompt", "assistant": "answer"}
        arrows = ", ".join(f"{source} -> {as_text.get(target, target)}" for source, target in found.says)
        notes.shape = f"{found.name} rows: {arrows}" if found.name else f"rows: {arrows}"
        return ReadRow({**parts, FOLDER: row.get(FOLDER)}, row, found.where, chat, notes, trained)


def reader_of(task: str, rows: Any, *, chat: bool | None, ignored: str | None = None, **facts) -> RowReader:
    """The reader of a set, from its columns and their types, if these are known. A system text, earlier turns or tools make all rows chats.

    `ignored` is the value of --ignore_columns, names with commas between them.
    """
    ignored = tuple(names_in(ignored))
    added = [name for name in (*SYSTEMS, HISTORY, *TOOLS) if name in rows.column_names and name not in ignored]
    is_chat = chat is False and (added or facts.get("system") is not None)
    facts["narrow"] = narrow_columns(getattr(rows, "features", None))
    return RowReader(task, chat=True if is_chat else chat, ignored=ignored, **facts)


# --- the tasks


def _read_sft(reader: RowReader, columns: Columns, notes: Notes) -> Found:
    named = reader.prompt_key is not None or bool(reader.answer_keys)
    if reader.pretrain:
        return _text(reader, columns)
    if reader.prompt_key is not None and reader.chat is False:
        text_value(columns.take(reader.prompt_key), f"{reader.prompt_flag} {reader.prompt_key}")
    prompt = prompt_of(reader, columns, notes)
    refuse_verdict(columns, reader.answer_keys)
    if prompt.value is None and not named and reader.chat is None and "text" in columns.row:
        refuse_answer_beside_text(columns)
        return _text(reader, columns)
    answer = reader.answer_keys[0] if reader.answer_keys else None
    whole = isinstance(prompt.value, list) and bool(prompt.value) and is_answer(prompt.value[-1])
    if answer is None and not whole and (not named or isinstance(prompt.value, str)) and reader.prompt_key is None:
        answer = columns.find(ANSWERS, "--output_key") or columns.find(MORE_ANSWERS, "--output_key")
        answer = answer or (CALLS if calls_of(columns.row.get(CALLS)) else None)
    if answer is None:
        if not isinstance(prompt.value, list):
            raise no_answer(columns, prompt, reader.chat)
        return _whole(columns, prompt, notes, named)
    where = f"--output_key {answer}" if reader.answer_keys else f"column {answer}"
    if prompt.value is None:
        raise no_question(columns, answer)
    if whole:
        raise UserError(prompt.where, ENDS_WITH_ANSWER, f"a conversation without {answer}, or one without an answer")
    found = Found(
        "alpaca" if prompt.columns[:1] == ("instruction",) and answer == "output" else "",
        {"prompt": prompt.value, "answer": after(prompt, answer_of(reader, columns, answer, where))},
        {"prompt": prompt.where, "answer": where},
        [*prompt.says, (answer, "assistant")],
    )
    found.chat = reader.chat if reader.chat is not None else _wants_chat(reader, prompt, answer, notes)
    return found


def _text(reader: RowReader, columns: Columns) -> Found:
    key = reader.prompt_key or "text"
    where = f"{reader.prompt_flag} {key}"
    parts = {"text": text_value(columns.take(key), where)}
    return Found("text", parts, {"text": where}, [(key, "text, with loss on every token")])


def _whole(columns: Columns, prompt: PromptPart, notes: Notes, named: bool) -> Found:
    """A conversation with its answers. A lone message of the assistant is a text, as in ms-swift."""
    value = prompt.value
    if len(value) == 1 and is_answer(value[0]) and not named and not columns.filled(TOOLS):
        [message] = messages_of(value, prompt.where, notes, template="")
        if not message.get("tool_calls") and message.get("train", True):
            says = [(f"{prompt.names} (one message of the assistant)", "text, with loss on every token")]
            return Found("", {"text": message["content"]}, {"text": prompt.where}, says)
    if prompt.columns[0] in MORE and not named and not is_answer(value[-1]):  # HelpSteer3
        raise waiting_turns(columns, prompt.names)
    first = value[0] if value and isinstance(value[0], dict) else {}
    name = "ShareGPT" if first.get("from") is not None and first.get("role") is None else "conversation"
    return Found(name, {"prompt": value}, {"prompt": prompt.where}, prompt.says, True)


def _read_prompt(reader: RowReader, columns: Columns, notes: Notes) -> Found:
    prompt = prompt_of(reader, columns, notes)
    if prompt.value is None:
        empty = [name for name in BEFORE_ANSWER if name in columns.names]
        raise UserError(
            f"column{'s' * (len(empty) > 1)} {', '.join(empty)}",
            "no prompt",
            flag_of_inner(columns.row, reader.prompt_flag) or "a text or messages; or --input_key",
        )
    value = prompt.value
    if reader.drop_answer and isinstance(value, list) and len(value) > 1 and is_answer(value[-1]):
        notes.facts.add("rows that end with an answer: the last answer is dropped")
        value = value[:-1]
    return Found("", {"prompt": value}, {"prompt": prompt.where}, prompt.says, has_turns(reader, prompt, notes))


_READERS: dict[str, Callable] = {SFT: _read_sft, PAIRS: read_pair, ANSWER: read_answer, PROMPT: _read_prompt}


def _wants_chat(reader: RowReader, prompt: PromptPart, answer: str, notes: Notes) -> bool:
    """`has_turns` for train_sft. Raises UserError if only a chat template could say how two texts are joined."""
    if is_chat := has_turns(reader, prompt, notes):
        return is_chat
    if RENDERED in notes.facts or reader.input_template or (prompt.names, answer) == ("prompt", "completion"):
        return False
    found = f"the tokenizer has no chat template, which makes turns of {prompt.names} and {answer}"
    raise UserError("--apply_chat_template", found, "--tokenizer_chat_template, or --input_template for plain texts")


def _with_system(parts: dict[str, Any], system: str, chat: bool, notes: Notes) -> dict[str, Any]:
    """The parts with `system` before their first turns. Conversations that begin with a system text keep it."""
    if not chat:
        raise UserError("--system", "a text without turns has no system text", "conversations, or no --system")
    opened = {}
    for name in ["prompt"] if parts["prompt"] is not None else [name for name in parts if name != "prompt"]:
        value = parts[name]
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if turns and isinstance(turns[0], dict) and role_of(turns[0]) == "system":
            notes.facts.add("--system is not used in conversations that have a system text")
        else:
            opened[name] = [{"role": "system", "content": system}, *turns]
    return parts | opened

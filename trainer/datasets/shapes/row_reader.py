"""Read a row of any known shape as the parts of a sample: a prompt and its answers, as texts or as messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.comma_separated import names_in
from trainer.datasets.conversations.messages import CALL, messages_of, role_of
from trainer.datasets.files.image_files import COLUMN as IMAGES
from trainer.datasets.files.image_files import FOLDER
from trainer.datasets.rows import column_of_key, narrow_columns, text_value
from trainer.datasets.shapes.columns import (
    ANSWERS,
    BEFORE_ANSWER,
    BESIDE_ANSWER,
    CALLS,
    CHOSEN,
    EMPTY,
    HISTORY,
    MARKS,
    MORE,
    MORE_ANSWERS,
    REJECTED,
    SYSTEMS,
    TEMPLATE_ARGS,
    TOOLS,
    Columns,
)
from trainer.datasets.shapes.notes import Notes
from trainer.datasets.shapes.prompt_part import (
    PromptPart,
    add_system,
    all_text,
    calls_of,
    has_name,
    is_answer,
    is_json_of_messages,
    is_transposed,
    prompt_part,
    raw_messages,
    refuse_places,
    texts_of,
    without_keys,
)
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_refusals import (
    no_answer,
    no_question,
    refuse_answer_beside_text,
    refuse_verdict,
    waiting_turns,
)
from trainer.datasets.shapes.transcripts import is_transcript, turns_before_answer, turns_of
from trainer.errors import UserError

SFT, PAIRS, ANSWER, PROMPT = "sft", "pairs", "answer", "prompt"  # what a row is read for
ENDS_WITH_ANSWER = "ends with an assistant message, and its answer is beside it"
RENDERED = "prompts that are rendered by the chat template already stay texts; --read_control_tokens keeps their control tokens"
TRANSCRIPTS = "Human: and Assistant: in the texts begin turns of a conversation"
AS_TEXTS = "no chat template is applied: texts are joined as they are. --apply_chat_template makes them turns of a conversation"


@dataclass(frozen=True)
class RowReader:
    """How the rows of a set are read: the columns that flags name, and what the tokenizer allows. See `reader_of`."""

    task: str
    prompt_key: str | None = None
    answer_keys: tuple[str, ...] = ()  # sft: of the answer, if named; pairs: chosen, rejected; answer: of its answer
    prompt_flag: str = "--input_key"
    answer_flags: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # columns and keys of messages that --ignore_columns names
    taken: tuple[str, ...] = ()  # columns that something else reads: a label, a margin, a reward
    system: str | None = None  # of conversations that have none: --system
    chat: bool | None = None  # whether texts become messages; None: where the shape and the tokenizer allow it
    pretrain: bool = False  # --pretrain_mode
    has_template: bool = True  # of the tokenizer
    input_template: bool = False  # --input_template
    openings: tuple[str, ...] = ()  # a prompt that begins with one is rendered already: see `openings_of`
    drop_answer: bool = False  # of prompts that end with one
    narrow: tuple[str, ...] = ()  # columns of numbers with fewer than 64 bits

    @property
    def makes_turns(self) -> bool:
        """Whether a prompt and its answers that are texts become turns without --apply_chat_template."""
        return self.has_template and not self.input_template and self.prompt_key is None

    def read(self, row: Any) -> ReadRow:
        """The parts of a row. Raises UserError that names the column for a row that cannot be read as a whole."""
        if isinstance(row, ReadRow):
            return row
        columns, notes = Columns(row, self.ignored, self.taken), Notes()
        found = _READERS[self.task](self, columns, notes)
        notes.left_out |= {name for name in self.ignored if has_name(row, columns, name)}
        parts = {name: without_keys(value, self.ignored) for name, value in found.parts.items()}
        chat = found.chat or any(isinstance(value, list) for value in parts.values())
        if self.system is not None:
            parts = _with_system(parts, self.system, chat, notes)
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
        columns.finish(notes, text, strict=not self.pretrain)
        as_text = {} if chat else {"user": "prompt", "assistant": "answer"}
        arrows = ", ".join(f"{source} -> {as_text.get(target, target)}" for source, target in found.says)
        notes.shape = f"{found.name} rows: {arrows}" if found.name else f"rows: {arrows}"
        return ReadRow({**parts, FOLDER: row.get(FOLDER)}, row, found.where, chat, notes)


@dataclass
class _Found:
    name: str
    parts: dict[str, Any]
    where: dict[str, str]
    says: list[tuple[str, str]]  # (columns, what they become)
    chat: bool = False


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


def _read_sft(reader: RowReader, columns: Columns, notes: Notes) -> _Found:
    named = reader.prompt_key is not None or bool(reader.answer_keys)
    if reader.pretrain:
        return _text(reader, columns)
    if reader.prompt_key is not None and reader.chat is False:
        text_value(columns.take(reader.prompt_key), f"{reader.prompt_flag} {reader.prompt_key}")
    prompt = _prompt_of(reader, columns, notes)
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
    found = _Found(
        "alpaca" if prompt.columns[:1] == ("instruction",) and answer == "output" else "",
        {"prompt": prompt.value, "answer": _after(prompt, _answer_of(reader, columns, answer, where))},
        {"prompt": prompt.where, "answer": where},
        [*prompt.says, (answer, "assistant")],
    )
    found.chat = reader.chat if reader.chat is not None else _wants_chat(reader, prompt, answer, notes)
    return found


def _text(reader: RowReader, columns: Columns) -> _Found:
    key = reader.prompt_key or "text"
    where = f"{reader.prompt_flag} {key}"
    parts = {"text": text_value(columns.take(key), where)}
    return _Found("text", parts, {"text": where}, [(key, "text, with loss on every token")])


def _whole(columns: Columns, prompt: PromptPart, notes: Notes, named: bool) -> _Found:
    """A conversation with its answers. A lone message of the assistant is a text, as in ms-swift."""
    value = prompt.value
    if len(value) == 1 and is_answer(value[0]) and not named and not columns.filled(TOOLS):
        [message] = messages_of(value, prompt.where, notes, template="")
        if not message.get("tool_calls") and message.get("train", True):
            says = [(f"{prompt.names} (one message of the assistant)", "text, with loss on every token")]
            return _Found("", {"text": message["content"]}, {"text": prompt.where}, says)
    if prompt.columns[0] in MORE and not named and not is_answer(value[-1]):  # HelpSteer3
        raise waiting_turns(columns, prompt.names)
    first = value[0] if value and isinstance(value[0], dict) else {}
    name = "ShareGPT" if first.get("from") is not None and first.get("role") is None else "conversation"
    return _Found(name, {"prompt": value}, {"prompt": prompt.where}, prompt.says, True)


def _read_pair(reader: RowReader, columns: Columns, notes: Notes) -> _Found:
    keys = [key if column_of_key(columns.row, key) else columns.find(names, flag)
            for key, names, flag in zip(reader.answer_keys, (CHOSEN, REJECTED), reader.answer_flags)]  # fmt: skip
    labels = [f"{flag} {key or wanted}" for flag, key, wanted in zip(reader.answer_flags, keys, reader.answer_keys)]
    sides = [_answer_of(reader, columns, key, label) if key else None for key, label in zip(keys, labels)]
    prompt = _prompt_of(reader, columns, notes)
    refuse_places(columns, keys)
    if keys[0] is None and keys[1] is not None:
        ends = isinstance(prompt.value, list) and bool(prompt.value) and is_answer(prompt.value[-1])
        beside = keys[1] == BESIDE_ANSWER and not ends
        if beside and (name := columns.find(ANSWERS, reader.answer_flags[0])):
            sides[0], keys[0] = _answer_of(reader, columns, name, f"{reader.answer_flags[0]} {name}"), name
        elif isinstance(prompt.value, list):
            sides[0], keys[0] = _split_answer(prompt, sides[1])
    for side, label in zip(sides, labels):
        if side is None:
            raise UserError(label, "no value", "a text, or messages")
    return _with_answers(reader, columns, notes, prompt, dict(zip(("chosen", "rejected"), sides)), keys)


def _split_answer(prompt: PromptPart, rejected: Any) -> tuple[Any, str]:
    """The last answer of a conversation as the chosen one (ms-swift). A rejected conversation keeps both whole."""
    whole, names = prompt.value, prompt.names
    if isinstance(rejected, list) and rejected and not is_answer(rejected[0]):
        prompt.value, prompt.says = None, []
        return whole, names
    last = len(whole)
    while last and is_answer(whole[last - 1]):
        last -= 1
    if last == len(whole):
        raise UserError(prompt.where, "does not end with an assistant message", "an answer")
    prompt.value = whole[:last]
    return whole[last:], f"the last answer of {names}"


def _read_answer(reader: RowReader, columns: Columns, notes: Notes) -> _Found:
    [key], [flag] = reader.answer_keys, reader.answer_flags
    name = key if column_of_key(columns.row, key) else None
    prompt = _prompt_of(reader, columns, notes)
    if name is None and not (isinstance(prompt.value, list) and prompt.value and is_answer(prompt.value[-1])):
        name = columns.find(ANSWERS, flag) or columns.find(MORE_ANSWERS, flag)
        if name is None and isinstance(prompt.value, list):
            raise UserError(prompt.where, "does not end with an assistant message", f"an answer, there or in {flag}")
        if name is None:
            raise UserError(flag, f"no key {key!r} in the row", ", ".join(columns.row))
    answer = None if name is None else _answer_of(reader, columns, name, f"{flag} {name}")
    return _with_answers(reader, columns, notes, prompt, {"completion": answer}, [name])


def _with_answers(
    reader: RowReader, columns: Columns, notes: Notes, prompt: PromptPart, answers: dict[str, Any], keys: list
) -> _Found:
    """A prompt and its answers. Turns that whole conversations share with the prompt stand once."""
    answers = {name: _after(prompt, value) for name, value in answers.items()}
    if prompt.value is None and reader.has_template and all(map(is_transcript, answers.values())):
        answers = {name: turns_of(value) for name, value in answers.items()}
        notes.facts.add(TRANSCRIPTS)
    if prompt.value is None and all(isinstance(value, list) for value in answers.values()):
        prompt.value = []
        add_system(prompt, columns)
        prompt.value = prompt.value or None
    whole = [value for value in answers.values() if isinstance(value, list) and value and not is_answer(value[0])]
    is_without = prompt.value is None and not whole and not all(map(is_transcript, answers.values()))
    if is_without and any(name in columns.names for name in BEFORE_ANSWER):
        raise no_question(columns, None)
    for value in whole:
        prompt.value = _without_shared(prompt, value)
    if len(whole) < sum(value is not None for value in answers.values()):
        prompt.value = _without_answer(prompt, answers)
    if _is_repeated(prompt.value, answers):
        notes.facts.add("answers that begin with the text of their prompt keep it, so it is there twice")
    says = [*prompt.says, *((key, name) for key, name in zip(keys, answers) if key)]
    where = {name: f"{flag} {key}" for name, flag, key in zip(answers, reader.answer_flags, keys)}
    where["prompt"] = prompt.where
    return _Found("", {"prompt": prompt.value, **answers}, where, says, _is_chat(reader, prompt, notes))


def _is_repeated(prompt: Any, answers: dict[str, Any]) -> bool:
    """Whether texts of all answers begin with the text of the prompt."""
    texts = [value for value in answers.values() if isinstance(value, str)]
    start = prompt.strip() if isinstance(prompt, str) else ""
    return bool(start and texts) and all(text.lstrip().startswith(start) for text in texts)


def _without_answer(prompt: PromptPart, answers: dict[str, Any]) -> Any:
    """The prompt without its last message if that is one of the answers. Raises UserError if it is another answer."""
    turns = prompt.value
    if not isinstance(turns, list) or not turns or not is_answer(turns[-1]):
        return turns
    known = [
        [{"role": "assistant", "content": value}] if isinstance(value, str) else value for value in answers.values()
    ]
    if texts_of(turns[-1:]) not in [texts_of(value) for value in known if value is not None]:
        raise UserError(prompt.where, ENDS_WITH_ANSWER, "turns up to the one that is answered")
    return turns[:-1]


def _without_shared(prompt: PromptPart, whole: list) -> Any:
    """The prompt without the turns that a whole conversation has. Raises UserError if they contradict each other."""
    if prompt.value is None:
        return None
    turns = [{"role": "user", "content": prompt.value}] if isinstance(prompt.value, str) else prompt.value
    known = texts_of(whole)
    left = [turn for turn in turns if not texts_of([turn]) <= known]
    roles = [role_of(turn) if isinstance(turn, dict) else None for turn in left]
    if set(roles) <= {"system"}:
        if left and role_of(whole[0]) == "system":
            raise UserError(prompt.where, "another system text than that of the conversation", "one of them")
        return left or None
    if len(left) == len(turns) and roles[-1] in ("assistant", CALL, "tool"):
        return turns  # the conversation goes on after the prompt
    raise UserError(prompt.where, "its turns are not those of the answers' conversations", "the same turns")


def _read_prompt(reader: RowReader, columns: Columns, notes: Notes) -> _Found:
    prompt = _prompt_of(reader, columns, notes)
    if prompt.value is None:
        raise UserError(f"{reader.prompt_flag} messages", "no value", "a prompt")
    value = prompt.value
    if reader.drop_answer and isinstance(value, list) and len(value) > 1 and is_answer(value[-1]):
        notes.facts.add("rows that end with an answer: the last answer is dropped")
        value = value[:-1]
    return _Found("", {"prompt": value}, {"prompt": prompt.where}, prompt.says, _is_chat(reader, prompt, notes))


_READERS: dict[str, Callable] = {SFT: _read_sft, PAIRS: _read_pair, ANSWER: _read_answer, PROMPT: _read_prompt}


# --- pieces


def _prompt_of(reader: RowReader, columns: Columns, notes: Notes) -> PromptPart:
    """What comes before the answer. A transcript that waits for one is a conversation where texts become turns."""
    prompt = prompt_part(columns, reader.prompt_key, reader.prompt_flag)
    if reader.makes_turns and (turns := turns_before_answer(prompt.value)):
        prompt.value, prompt.is_chat, prompt.is_transcript = turns, True, True
        prompt.says = [(prompt.names, "turns")]
        notes.facts.add(TRANSCRIPTS)
    return prompt


def _after(prompt: PromptPart, answer: Any) -> Any:
    """The answer to a prompt. That to a transcript is without white space at its ends, or the whole transcript again."""
    if not prompt.is_transcript or not isinstance(answer, str):
        return answer
    whole = f"\n\n{answer.strip()}"
    return turns_of(whole) if is_transcript(whole) else answer.strip()


def _answer_of(reader: RowReader, columns: Columns, key: str, where: str) -> Any:
    value = columns.take(key)
    calls = calls_of(value) if key == CALLS else None
    return calls or _answer(value, where, key in reader.narrow)


def _answer(value: Any, where: str, narrow: bool = False) -> Any:
    """An answer: a text, the text of a number, or raw messages. `narrow`: see `text_value`."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        raise UserError(where, "a list of texts", "one text, or messages")
    if isinstance(value, list) or (isinstance(value, dict) and (role_of(value) or is_transposed(value))):
        return raw_messages(value)
    if is_json_of_messages(value):
        return raw_messages(value)
    return text_value(value, where, numbers=True, narrow=narrow)


def _is_chat(reader: RowReader, prompt: PromptPart, notes: Notes) -> bool:
    """Whether a prompt and its answers are messages: a flag says so, or the prompt is a text that no flag named."""
    if reader.chat or prompt.is_chat or prompt.value is None or not reader.makes_turns:
        return bool(reader.chat) or prompt.is_chat
    if not prompt.value.startswith(reader.openings):
        return True
    notes.facts.add(RENDERED)
    return False


def _wants_chat(reader: RowReader, prompt: PromptPart, answer: str, notes: Notes) -> bool:
    """`_is_chat` for train_sft. Raises UserError if only a chat template could say how two texts are joined."""
    if is_chat := _is_chat(reader, prompt, notes):
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

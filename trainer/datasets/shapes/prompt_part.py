"""The part of a row before its answer: a conversation, or a text with its second text, system text and earlier turns."""

import re
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from trainer.datasets.conversations.messages import CALL, CONTENTS, IGNORE, as_single_messages, role_of
from trainer.datasets.rows import json_text, kind_of, lookup, text_value
from trainer.datasets.shapes.columns import (
    CONVERSATIONS,
    DATA,
    EMPTY,
    HISTORY,
    MORE,
    PROMPTS,
    SYSTEMS,
    TOOLS,
    Columns,
    plain_name,
)
from trainer.errors import UserError

OTHER_TEXTS = set(map(plain_name, (*CONVERSATIONS, *PROMPTS, "text")))  # known places of a question or a conversation
ROLE_KEY = re.compile(r'"(role|from)"\s*:')


@dataclass
class PromptPart:
    """`value` is a text, raw messages, or None. `says` has (columns, what they become)."""

    value: Any = None
    where: str = ""
    says: list[tuple[str, str]] = field(default_factory=list)
    columns: tuple[str, ...] = ()
    is_chat: bool = False  # it has a system text or earlier turns, which only messages can hold
    is_transcript: bool = False

    @property
    def names(self) -> str:
        return " + ".join(self.columns)


def prompt_part(columns: Columns, key: str | None, flag: str) -> PromptPart:
    """What comes before an answer. `key` is the column that `flag` names; None looks for one by its name."""
    name = key if key is not None else _conversation_of(columns)
    if name is not None and is_conversation(name, lookup(columns.row, name)):
        value = raw_messages(columns.take(name), texts=name in (*CONVERSATIONS, DATA))
        if not isinstance(value, list):
            inside = f"; {flag} {name}.{next(iter(value))} names a key of it" if isinstance(value, dict) else ""
            raise UserError(f"{flag} {name}", kind_of(value), f"a text, or a list of messages{inside}")
        found = PromptPart(value, f"{flag} {name}", [(name, "turns")], (name,), True)
    elif key is None and any(name in columns.row for name in CONVERSATIONS):
        name = next(name for name in CONVERSATIONS if name in columns.row)
        value = columns.row[name]
        found = f"a text that is no JSON of a list: {value[:40]!r}" if isinstance(value, str) else kind_of(value)
        raise UserError(f"{flag} {name}", found, "a list of messages with role and content, or its JSON")
    else:
        found = _text_part(columns, key, flag)
    if found.value is not None:
        if key is None:
            _refuse_other_text(found, columns)
        add_system(found, columns)
    return found


def _text_part(columns: Columns, key: str | None, flag: str) -> PromptPart:
    name = key if key is not None else columns.find(PROMPTS, flag)
    name = name or columns.filled(MORE)  # {input, output}
    if name is None:
        return PromptPart()
    where = f"{flag} {name}" if key is not None else f"column {name}"
    if key is None and (cure := flag_of_inner({name: columns.row[name]}, flag)):
        raise UserError(where, f"an object with the keys {', '.join(columns.row[name])}", cure)
    found = PromptPart(text_value(columns.take(name), where), where, [], (name,))
    while (key is None or key in PROMPTS) and (more := columns.filled(MORE)):
        second = text_value(columns.take(more), f"column {more}")
        found.value = f"{found.value}\n{second}" if found.value.strip() else second
        found.columns += (more,)
    found.says.append((found.names, "user"))
    if columns.filled((HISTORY,)):
        turns = raw_messages(columns.take(HISTORY))
        if not isinstance(turns, list):
            raise UserError(f"column {HISTORY}", kind_of(turns), "pairs [question, answer], or messages")
        found.value = [*turns, {"role": "user", "content": found.value}]
        found.says.insert(0, (HISTORY, "earlier turns"))
        found.is_chat = True
    return found


def flag_of_inner(row: dict[str, Any], flag: str) -> str:
    """`flag` with the conversation or the question inside an object of a row, as in batches of OpenAI; "" without one."""
    inner = ((f"{flag} {name}.{key}", value.get(key)) for name, value in row.items() if isinstance(value, dict)
             for key in (*CONVERSATIONS, *PROMPTS))  # fmt: skip
    return next((cure for cure, value in inner if value not in EMPTY), "")


def add_system(found: PromptPart, columns: Columns) -> None:
    """Put the system text of a column before the turns. Raises UserError if they begin with another one."""
    name = columns.find(SYSTEMS)
    text = text_value(columns.take(name), f"column {name}") if name else ""
    if not text.strip():
        return
    turns = [{"role": "user", "content": found.value}] if isinstance(found.value, str) else found.value
    if turns and texts_of(turns[:1]) == {("system", text.strip())}:
        return
    if turns and isinstance(turns[0], dict) and role_of(turns[0]) == "system":
        raise UserError(f"column {name}", "another system text than that of the conversation", "one of them")
    found.value = [{"role": "system", "content": text}, *turns]
    found.where = found.where or f"column {name}"
    found.says.insert(0, (name, "system"))
    found.is_chat = True


def _conversation_of(columns: Columns) -> str | None:
    row, has_text = columns.row, any(isinstance(columns.row.get(name), str) for name in PROMPTS)
    names = (*CONVERSATIONS, *PROMPTS, *(() if has_text else (*MORE, DATA)))
    return next((name for name in names if is_conversation(name, row.get(name)) and _may_be(name, row[name])), None)


def _may_be(name: str, value: Any) -> bool:
    """A list of paragraphs is no conversation. Texts under `data` are turns if an answer follows each question."""
    if name not in (*MORE, DATA):
        return True
    is_list = isinstance(value, list) and bool(value)
    is_texts = name == DATA and is_list and len(value) % 2 == 0 and all(isinstance(text, str) for text in value)
    return is_texts or (is_list and all(map(_has_role, value)))


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and role_of(message) is not None


def is_conversation(name: str, value: Any) -> bool:
    """Whether a column holds messages: a list, one message, or their JSON. Other lists only have names of conversations."""
    is_json = isinstance(value, str) and name in CONVERSATIONS and isinstance(raw_messages(value), list)
    return is_json or isinstance(value, (list, dict)) or is_json_of_messages(value)


def is_json_of_messages(value: Any) -> bool:
    """Whether a text is the JSON of messages with roles, as in files without nested columns."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or not ROLE_KEY.search(value):
        return False
    messages = raw_messages(value)
    return isinstance(messages, list) and bool(messages) and all(map(_has_role, messages))


def raw_messages(value: Any, texts: bool = False) -> Any:
    """A list of single messages, also from one message, from pairs, or from the JSON of a list. Another value stays.

    An object of lists, as Arrow has a sequence of objects, is a list of objects: {role: [...], content: [...]}.
    `texts`: a list of texts has the turns of the user and the assistant, the user's first (LIMA).
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json_text(value)
        except ValueError:
            return value
    if isinstance(value, dict) and role_of(value):
        value = [value]
    elif isinstance(value, dict) and is_transposed(value):
        columns = {key: items for key, items in value.items() if items is not None}
        value = [dict(zip(columns, items)) for items in zip(*columns.values())]
    if texts and isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        value = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), value)]
    return as_single_messages(value) if isinstance(value, list) else value


def calls_of(value: Any) -> list[dict] | None:
    """The message of calls of tools, from a list of {name, arguments} or its JSON (xlam). None for another value."""
    calls = raw_messages(value) if isinstance(value, str) else value
    is_calls = (
        isinstance(calls, list) and calls and all(isinstance(c, dict) and {*c} == {"name", "arguments"} for c in calls)
    )
    wrapped = is_calls and [{"type": "function", "function": call} for call in calls]
    return [{"role": "assistant", "content": "", "tool_calls": wrapped}] if wrapped else None


def is_transposed(value: dict) -> bool:
    """Whether an object has the lists of a conversation's roles and texts, all of one length."""
    lists = [items for items in value.values() if items is not None]
    has_roles = any(isinstance(value.get(key), list) for key in ("role", "from"))
    return has_roles and all(isinstance(items, list) for items in lists) and len(set(map(len, lists))) == 1


def is_answer(message: Any) -> bool:
    """Whether a raw message is the assistant's."""
    return isinstance(message, dict) and role_of(message) in ("assistant", CALL)


def content_of(message: Any) -> Any:
    """The text of a raw message, also of one in parts."""
    message = message if isinstance(message, dict) else {}
    content = next((message[key] for key in CONTENTS if message.get(key) is not None), None)
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content


def texts_of(messages: list) -> set[tuple]:
    """(role, text) of raw messages: two spellings of one turn are equal."""
    return {(role_of(m) if isinstance(m, dict) else None, str(content_of(m) or "").strip()) for m in messages}


def all_text(value: Any) -> str:
    """The text of a part, which is a text or raw messages."""
    if isinstance(value, list):
        return "\n".join(str(content_of(message) or "") for message in value)
    return value if isinstance(value, str) else ""


def _refuse_other_text(found: PromptPart, columns: Columns) -> None:
    """Raise UserError for another conversation, question or text than that of the prompt. A column of rendered turns is none."""
    turns = [{"role": "user", "content": found.value}] if isinstance(found.value, str) else found.value
    known, text = texts_of(turns), all_text(found.value)
    for name in columns.row:
        if name in columns.used | columns.taken or plain_name(name) not in OTHER_TEXTS:
            continue
        value = raw_messages(columns.row[name], texts=name in CONVERSATIONS)
        is_known = value in EMPTY or (isinstance(value, list) and texts_of(value) <= known)
        is_part = isinstance(value, str) and value.strip() in text
        is_rendered = isinstance(value, str) and all(content in value for _, content in known)
        if not (is_known or is_part or is_rendered):
            raise UserError(f"column {name}", f"another text than that of {found.names}", f"{IGNORE} with one of them")


def has_name(row: Any, columns: Columns, name: str) -> bool:
    """Whether a row has this name as a column, as a key of a message that was read, or as `a.b` inside an object."""
    head, _, rest = name.partition(".")
    inner = row[head] if rest and head in row else None
    if name in row or (isinstance(inner, dict) and rest in inner):
        return True
    read = [raw_messages(lookup(columns.row, key)) for key in columns.keys if key not in TOOLS]
    return any(isinstance(m, dict) and name in m for value in read if isinstance(value, list) for m in value)


def without_keys(value: Any, ignored: tuple[str, ...]) -> Any:
    """The messages without these keys. Another value stays."""
    if not isinstance(value, list) or not ignored:
        return value
    return [{k: v for k, v in m.items() if k not in ignored} if isinstance(m, dict) else m for m in value]

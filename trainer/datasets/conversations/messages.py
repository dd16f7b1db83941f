"""Read the messages of a conversation, and the tools that it may call, from a row.

Every role, key and part of a message is used, refused, or named in the notes of its row. The functions raise UserError
if a value has another type than its key needs.
"""

import json
import re
from typing import Any

from trainer.datasets.rows import AsWritten, json_text, kind_of
from trainer.datasets.shapes.notes import Notes
from trainer.errors import UserError

CALL = "function_call"
# the names that public data gives to a role; case does not count
NAMES_OF_ROLES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt bot model chatgpt bing bard ai",
    "tool": "tool function observation tool_response tool_result function_response ipython",
    CALL: "function_call tool_call tool_calls",
}
ROLES = {name: role for role, names in NAMES_OF_ROLES.items() for name in names.split()}
# two texts of one item: a conversation may be a list of such pairs
PAIR_KEYS = {"system": ("system",)}
PAIR_KEYS["user"] = ("human", "user", "prompt", "instruction", "question", "input")
PAIR_KEYS["assistant"] = ("assistant", "gpt", "bot", "response", "answer", "output")
TRAIN = "train"  # the key of a message that says whether its turn has a loss
CONTENTS = ("content", "value", "text")
TEXT_PARTS = ("text", "input_text", "output_text")
TRAIN_FLAGS = ("weight", "loss", "loss_scale", "loss_mask", TRAIN, "training", "trainable", "train_on_turn")
# a key with one of these words may exclude a turn from the loss, with either value
LOSS_WORDS = re.compile(
    r"(^|[^a-z])(un)?(mask|ignor|skip|exclud|includ|omit|drop|loss|train|weight|learn(able|ed)?\b|supervis|gradient|backprop)"
)
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
MORE_THOUGHTS = ("reasoning_details", "thoughts", "chain_of_thought", "cot")  # that no template reads
# keys that would change the text or the loss: never merely named
REFUSED_KEYS = {"prefix", "refusal", "image", "images", "video", "videos", "audio"}
REFUSED_KEYS |= {"audios", "files", "documents", "tools", "functions", *THOUGHTS, *MORE_THOUGHTS}
EMPTY = (False, "", [])  # values of a key that say nothing
IGNORE = "--ignore_columns"


def role_of(message: dict) -> str | None:
    """The role of a message under any of its public names, or None."""
    name = next((message[key] for key in ("role", "from") if message.get(key) is not None), None)
    return _role_named(name)


def _role_named(name: Any) -> str | None:
    """The role of a name. Case, and a hyphen or a space for an underscore, do not count."""
    return ROLES.get(re.sub(r"[\s-]+", "_", name.strip().lower())) if isinstance(name, str) else None


def messages_of(value: Any, where: str, notes: Notes | None = None, template: str | None = None) -> list[dict]:
    """Return messages with role and content, also from {from, value}. Keys without a value are dropped.

    A role becomes that of the templates: system, user, assistant or tool. A call of a tool becomes `tool_calls` of the
    assistant. A flag that includes or excludes a turn becomes the key `train`.
    With a `template`, keys that it does not read are left out and noted, or refused if they would change the text.
    """
    value = _parsed_list(value)
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        raise UserError(where, kind_of(value), "a list of messages")
    messages: list[dict] = []
    for number, message in enumerate(as_single_messages(value), 1):
        place = f"{where} message {number}"
        message = _message(message, place, notes or Notes(), template)
        if messages and _joins(messages[-1], message):
            messages[-1] = _joined(messages[-1], message, place)
        else:
            messages.append(message)
    return messages


def as_single_messages(value: list) -> list:
    """The items of a conversation as single messages: [{human, assistant}] and [[question, answer]] become two each.

    Pairs that all begin with the name of a role are messages: [["human", question], ["gpt", answer]]. A system text may
    stand before other pairs.
    """
    messages = []
    named = [isinstance(item, list) and len(item) == 2 and _role_named(item[0]) for item in value]
    if any(named) and not all(named) and (named[0] != "system" or any(named[1:])):
        item = next(item for item, role in zip(value, named, strict=True) if role)
        found = f"{item[0]!r} may be a role or a question: the other turns do not begin with a role"
        raise UserError("a conversation of pairs", found, "pairs of one kind, or messages with role and content")
    value = [{"role": item[0], "content": item[1]} if role else item for item, role in zip(value, named, strict=True)]
    for item in value:
        if isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item):
            messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), item)]
        elif isinstance(item, dict) and not {"role", "from"} & {key for key in item if item[key] is not None}:
            messages += _pair(item) or [item]
        else:
            messages.append(item)
    return messages


def _pair(item: dict) -> list[dict] | None:
    """The messages of {human, assistant}, or None if an item has another key or only one of them."""
    present = {key: text for key, text in item.items() if text is not None}
    found = [(role, key) for role, keys in PAIR_KEYS.items() for key in keys if key in present]
    if len(found) != len(present) or [role for role, _ in found if role != "system"] != ["user", "assistant"]:
        return None
    return [{"role": role, "content": present[key]} for role, key in found if present[key] != "" or role != "system"]


def tools_of(row: Any) -> list[dict] | None:
    """Return the JSON schemas of functions in the column `tools`, or None. A row has a list or its JSON text.

    One tool may stand for a list, its JSON for a tool, and a bare function, as in OpenAI's `functions`, for its schema.
    """
    value = row.get("tools")
    if isinstance(value, str):
        try:
            value = json_text(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise UserError("column tools", f"broken JSON ({error.msg})", "a list of objects, or its JSON") from None
    if not value:
        return None
    items = value if isinstance(value, list) else [value]
    tools = [_parsed_object(tool) if isinstance(tool, str) else tool for tool in items]
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError("column tools", "not a list of objects", "a list of objects, or its JSON")
    tools = [tool if isinstance(tool, AsWritten) else _without_none(tool) for tool in tools]
    if not all(isinstance(tool.get("function", tool), dict) for tool in tools):
        raise UserError("column tools", "a function that is no object", "the schemas of functions")
    is_bare = [isinstance(tool.get("name"), str) and not {"type", "function"} & tool.keys() for tool in tools]
    return [{"type": "function", "function": tool} if bare else tool for tool, bare in zip(tools, is_bare)] or None


def _message(message: Any, where: str, notes: Notes, template: str | None) -> dict:
    message = _without_none(message)
    if not isinstance(message, dict) or not isinstance(message.get("role", message.get("from")), str):
        raise UserError(where, f"no role, in {_outline(message)}", "an object with role and content, or from and value")
    role = role_of(message)
    if "role" in message and _role_named(message.get("from")) not in (None, role):
        raise UserError(where, f"two roles: {message['role']} and {message['from']}", "one of role and from")
    if role is None and template is None:
        role = message.get("role", message.get("from"))  # of a program, not of a row
    elif role is None:
        found = f"no role was recognised: {message.get('role', message.get('from'))}"
        raise UserError(where, found, ", ".join(ROLES))
    if "role" in message and "from" in message and _role_named(message["from"]) is None:
        notes.keys.add("from")  # the name of a speaker
    contents = [message[key] for key in CONTENTS if key in message]
    if any(other != contents[0] for other in contents):
        raise UserError(where, "two different texts", f"one of {', '.join(CONTENTS)}")
    content = contents[0] if contents else None
    calls = _calls_of(message, where)
    if role == CALL and calls and content:
        raise UserError(where, "calls in its content, and others beside it", "all calls in one place")
    if role == CALL:
        kept = {"role": "assistant", "content": "", "tool_calls": calls or _calls(content, where)}
    else:
        kept = {"role": role, "content": _text(content, where, notes, bool(calls))}
        kept |= {"tool_calls": calls} if calls else {}
    kept |= _train_flag(message, role, where)
    others = {key: value for key, value in message.items() if key not in _READ}
    return kept | _other_keys(others, kept["role"], where, notes, template)


def _outline(value: Any) -> str:
    """What a value is, for an error: with the keys of an object, the kinds of a list, and the start of a text."""
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(map(str, value))}" if value else "an empty object"
    if isinstance(value, list):
        kinds = dict.fromkeys(kind_of(item).partition(" ")[2] for item in value)
        return f"a list of {', '.join(kinds)}" if value else "an empty list"
    return f"the {kind_of(value).partition(' ')[2]} {str(value)[:40]!r}" if value is not None else "no value"


_READ = {"role", "from", *CONTENTS, "tool_calls", CALL, *TRAIN_FLAGS}


def _text(content: Any, where: str, notes: Notes, has_calls: bool) -> str:
    if content is None and has_calls:
        return ""  # only a tool call: templates differ on a missing content, but all accept ""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        part = next((part for part in content if not isinstance(part.get("text"), str)), {})
        other = part.get("type")
        if other is not None:
            found = f"a part of type {other!r}"
            found += f" without a text, {_outline(part)}" if other in TEXT_PARTS else ""
            raise UserError(where, found, "text; or image, in rows with a column images")
        if all(part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str) for part in content):
            return "".join(text_of_part(part, where, notes) for part in content)
    if not isinstance(content, str):
        allowed = "a text; or parts of texts and images, in rows with a column images"
        raise UserError(where, f"its content is not a text: {_outline(content)}", allowed)
    return content


def text_of_part(part: dict, where: str, notes: Notes) -> str:
    """The text of a part. Its other keys are noted, or refused if they would change the text or the loss."""
    for key, value in part.items():
        if key not in ("type", "text") and value is not None:
            if _changes(key, value):
                raise UserError(where, f"a part with the key {key!r}, which is not used", "parts without it")
            notes.keys.add(key)
    return part["text"]


def _calls_of(message: dict, where: str) -> list | None:
    """The calls of an assistant's message, also in the older form of one `function_call`."""
    calls = message.get("tool_calls") or None
    old = message.get(CALL)
    if isinstance(calls, str):
        calls = _calls(calls, where)
    if calls is not None and not isinstance(calls, list):
        raise UserError(where, f"tool_calls is {kind_of(calls)}", "a list of calls")
    calls = calls and [_with_arguments(call, where) for call in calls]
    if calls and old:
        raise UserError(where, f"both tool_calls and {CALL}", f"one of them, or {IGNORE} {CALL}")
    return calls or (_calls(old, where) if old else None)


def _with_arguments(call: Any, where: str) -> dict:
    """A call whose function has arguments. Some data names them parameters; a call without any has none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():  # templates print an empty name
        raise UserError(where, "a call of a tool without a name", '{"function": {"name": ..., "arguments": {...}}}')
    if function.get("arguments") is not None:
        return call
    named = {key: value for key, value in function.items() if key not in ("arguments", "parameters")}
    named["arguments"] = function.get("parameters", AsWritten())
    return {**call, "function": named} if "function" in call else named


def _calls(content: Any, where: str) -> list[dict]:
    """Calls of tools as templates read them, from an object with a name and arguments, a list of them, or its JSON."""
    if isinstance(content, str):
        try:
            content = json_text(content)
        except ValueError:
            content = None
    calls = content if isinstance(content, list) else [content]
    found = []
    for whole in calls:
        call = whole.get("function", whole) if isinstance(whole, dict) else {}
        arguments = call.get("arguments", call.get("parameters", AsWritten()))
        if isinstance(arguments, str):
            arguments = _parsed_object(arguments)
        name = call.get("name")
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            raise UserError(where, "a call of a tool that cannot be read", '{"name": ..., "arguments": {...}}')
        outer = whole if "function" in whole else {}
        inner = {
            key: value for key, value in call.items() if key not in ("type", "parameters")
        }  # others: `check_shown`
        found.append({**outer, "type": "function", "function": inner | {"arguments": arguments}})
    return found


def _train_flag(message: dict, role: str, where: str) -> dict[str, bool]:
    """{"train": ...} if a key says whether the turn is trained."""
    found = {key: message[key] for key in TRAIN_FLAGS if key in message}
    for key, value in found.items():
        if value not in (0, 1):  # True and False are among them
            raise UserError(where, f"{key} is {value!r}", "true or false, 1 or 0")
        if value and role not in ("assistant", CALL) and key not in ("weight", "loss_scale"):
            raise UserError(where, f"{key} is {value!r} for the role {role}", "only turns of the assistant are trained")
    if len(set(map(bool, found.values()))) > 1:
        raise UserError(where, f"{', '.join(found)} contradict each other", "one of them")
    return {TRAIN: bool(*set(found.values()))} if found and role in ("assistant", CALL) else {}


def _other_keys(others: dict, role: str, where: str, notes: Notes, template: str | None) -> dict:
    """The keys that the template reads. Thoughts get the name under which it reads them."""
    if template is None:
        return others
    kept = {}
    for key, value in others.items():
        names = (key, *THOUGHTS) if key in THOUGHTS else (key,)
        name = next((name for name in names if reads(template, name)), None)
        if key in THOUGHTS and role != "assistant" and value not in EMPTY:
            raise UserError(where, f"its key {key!r} has thoughts of the role {role}", f"{IGNORE} {key}")
        if name and (name == key or name not in others):
            kept[name] = value
        elif _changes(key, value):
            found = f"the chat template does not read its key {key!r}, which would change the text or the loss"
            raise UserError(where, found, f"a template that does, or {IGNORE} {key}")
        else:
            notes.keys.add(key)
    return kept


def _changes(key: str, value: Any) -> bool:
    """Whether a key that nothing reads would change the text, or may exclude a turn: a mask does with either value."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", key).lower()
    return bool(LOSS_WORDS.search(words)) or (key in REFUSED_KEYS and value not in EMPTY)


def reads(template: str, key: str) -> bool:
    """Whether a chat template reads a key of a message. Loops name the message m, msg or message."""
    return bool(re.search(rf"\bm\w*(\[[^\]]+\])?(\.|\.get\(['\"]|\[['\"]){re.escape(key)}\b", template))


def _joins(before: dict, message: dict) -> bool:
    """Whether a call belongs to the assistant's message before it. Public data has them as two messages."""
    both = (before, message)
    return (
        all(one["role"] == "assistant" for one in both)
        and bool(message.get("tool_calls"))
        and not message["content"]
        and before.get(TRAIN) == message.get(TRAIN)
    )


def _joined(before: dict, call: dict, where: str) -> dict:
    """One message with the keys of both. Raises UserError if they have different values of one key, such as thoughts."""
    own = {key: value for key, value in call.items() if key not in ("role", "content", "tool_calls")}
    if twice := [key for key, value in own.items() if before.get(key, value) != value]:
        found = f"a call whose key {twice[0]!r} has another value than that of the message before it"
        raise UserError(where, found, f"one message with both, or {IGNORE} {twice[0]}")
    return before | own | {"tool_calls": [*before.get("tool_calls", []), *call["tool_calls"]]}


def _parsed_list(value: Any) -> Any:
    """The list of a JSON text, as in files without nested columns; else the value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json_text(value)
        except ValueError:
            return value
    return value


def _parsed_object(text: str) -> Any:
    try:
        return json_text(text or "{}")
    except ValueError:
        return None


def _without_none(value: Any) -> Any:
    """Drop keys with the value None, which a template would print. A null written in a tool's arguments stays."""
    if isinstance(value, dict):
        present = {key: child for key, child in value.items() if child is not None}
        kept = {k for k, child in present.items() if k in ("arguments", "parameters") and isinstance(child, AsWritten)}
        return {key: child if key in kept else _without_none(child) for key, child in present.items()}
    return [_without_none(child) for child in value] if isinstance(value, list) else value

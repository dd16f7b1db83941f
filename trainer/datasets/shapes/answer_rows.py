"""Read rows of preferences: pairs of answers, and single answers that are good or bad."""

import re
from dataclasses import replace
from typing import Any

from trainer.datasets.conversations.messages import CALL, IGNORE, role_of
from trainer.datasets.rows import column_of_key, lookup, truth_value
from trainer.datasets.shapes.columns import (
    ANSWERS,
    BEFORE_ANSWER,
    BESIDE_ANSWER,
    CHOSEN,
    EMPTY,
    LABELS,
    MORE_ANSWERS,
    REJECTED,
    VERDICTS,
    Columns,
    plain_name,
)
from trainer.datasets.shapes.notes import Notes
from trainer.datasets.shapes.prompt_part import PromptPart, add_system, all_text, is_answer, texts_of
from trainer.datasets.shapes.reading import TRANSCRIPTS, Found, Reading, after, answer_of, has_turns, prompt_of
from trainer.datasets.shapes.row_refusals import no_question
from trainer.datasets.shapes.spellings import refuse_unknown_prompt
from trainer.datasets.shapes.transcripts import is_cut_transcript, is_transcript, turns_of
from trainer.errors import UserError

SIDES, PAIR_FLAGS = ("chosen", "rejected"), ("--chosen_key", "--rejected_key")
ENDS_WITH_ANSWER = "ends with an assistant message, and its answer is beside it"


def read_pair(reader: Reading, columns: Columns, notes: Notes) -> Found:
    keys = [key if column_of_key(columns.row, key) else columns.find(names, flag)
            for key, names, flag in zip(reader.answer_keys, (CHOSEN, REJECTED), reader.answer_flags)]  # fmt: skip
    labels = [f"{flag} {key or wanted}" for flag, key, wanted in zip(reader.answer_flags, keys, reader.answer_keys)]
    sides = [answer_of(reader, columns, key, label) if key else None for key, label in zip(keys, labels)]
    prompt = prompt_of(reader, columns, notes)
    refuse_doubtful_pair(columns, keys)
    if keys[0] is None and keys[1] is not None:
        ends = isinstance(prompt.value, list) and bool(prompt.value) and is_answer(prompt.value[-1])
        beside = keys[1] == BESIDE_ANSWER and not ends
        if beside and (name := columns.find(ANSWERS, reader.answer_flags[0])):
            sides[0], keys[0] = answer_of(reader, columns, name, f"{reader.answer_flags[0]} {name}"), name
        elif isinstance(prompt.value, list):
            sides[0], keys[0] = _split_answer(prompt, sides[1])
    for side, label in zip(sides, labels):
        if side is None:
            raise UserError(label, "no value", "a text, or messages")
    return _with_answers(reader, columns, notes, prompt, dict(zip(SIDES, sides)), keys)


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


def read_answer(reader: Reading, columns: Columns, notes: Notes) -> Found:
    """A single answer, or one side of a pair."""
    if columns.side:
        return _read_side(reader, columns, notes)
    [key], [flag] = reader.answer_keys, reader.answer_flags
    is_known = key == "completion" and key in columns.row  # then another known answer could be meant
    name = key if column_of_key(columns.row, key) else None
    prompt = prompt_of(reader, columns, notes)
    name = columns.find(ANSWERS, IGNORE) if is_known else name
    if name is None and not (isinstance(prompt.value, list) and prompt.value and is_answer(prompt.value[-1])):
        name = columns.find(ANSWERS, flag) or columns.find(MORE_ANSWERS, flag)
        if name is None and isinstance(prompt.value, list):
            raise UserError(prompt.where, "does not end with an assistant message", f"an answer, there or in {flag}")
        if name is None:
            raise UserError(flag, f"no key {key!r} in the row", ", ".join(columns.row))
    answer = None if name is None else answer_of(reader, columns, name, f"{flag} {name}")
    return _with_answers(reader, columns, notes, prompt, {"completion": answer}, [name])


def _read_side(reader: Reading, columns: Columns, notes: Notes) -> Found:
    """The answer of a pair that is `columns.side`. Raises UserError for a row that has a label or a single answer too."""
    for name in (*LABELS, *reader.taken):
        if columns.row.get(name) not in EMPTY:
            found = "a label of its own, and pairs are labelled by which answer is chosen"
            raise UserError(f"column {name}", found, f"{IGNORE} {name}")
    found = read_pair(replace(reader, answer_keys=reader.pair_keys, answer_flags=PAIR_FLAGS), columns, notes)
    if name := columns.filled(reader.answer_keys):
        raise UserError(f"column {name}", "a single answer beside a pair", f"{IGNORE} with one of them")
    pair = [source for source, part in found.says if part in SIDES]
    found.says = [(source, part) for source, part in found.says if part not in SIDES]
    found.says.append((" and ".join(pair), "completion"))
    found.where["completion"] = found.where[columns.side]
    found.parts = {"prompt": found.parts["prompt"], "completion": found.parts[columns.side]}
    return found


def _with_answers(
    reader: Reading, columns: Columns, notes: Notes, prompt: PromptPart, answers: dict[str, Any], keys: list
) -> Found:
    """A prompt and its answers. Turns that whole conversations share with the prompt stand once."""
    answers = {name: after(prompt, value) for name, value in answers.items()}
    if prompt.value is None and any(is_cut_transcript(value) for value in answers.values()):
        found = "begins with Human: and does not end with a turn of Assistant:"
        raise UserError(f"{reader.answer_flags[0]} {keys[0]}", found, "a conversation that ends with an answer")
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
    if is_without:
        refuse_unknown_prompt(columns, list(map(all_text, answers.values())))
    for value in whole:
        prompt.value = _without_shared(prompt, value)
    if len(whole) < sum(value is not None for value in answers.values()):
        prompt.value = _without_answer(prompt, answers)
    if _is_repeated(prompt.value, answers):
        notes.facts.add("answers that begin with the text of their prompt keep it, so it is there twice")
    says = [*prompt.says, *((key, name) for key, name in zip(keys, answers) if key)]
    where = {name: f"{flag} {key}" for name, flag, key in zip(answers, reader.answer_flags, keys)}
    where["prompt"] = prompt.where
    return Found("", {"prompt": prompt.value, **answers}, where, says, has_turns(reader, prompt, notes))


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


UNDECIDED = ("tie", "istie", "swapped", "isswapped", "flipped", "isflipped")  # true: chosen may not be better
WINNERS = ("preference", "preferred", "winner", "better", "choice")  # one may name the rejected answer


def refuse_doubtful_pair(columns: Columns, keys: list[str | None]) -> None:
    """Raise UserError if other columns contradict the answers under `keys`, or if these only name texts of other columns."""
    _refuse_other_answers(columns, keys)
    values = [lookup(columns.row, key) for key in keys if key]
    if len(values) == 2 and all(type(value) in (int, str) for value in values):
        _refuse_places(columns, keys, [str(value).strip() for value in values])
    for name, value in _others(columns).items():
        plain, truth = plain_name(name), truth_value(value)
        is_against = (plain in VERDICTS and truth is False) or (plain in UNDECIDED and truth is True)
        if is_against or (plain in WINNERS and str(value).strip().lower() == "rejected"):
            found = f"{value!r} may say that the chosen answer is not the better one, and is not used here"
            raise UserError(f"column {name}", found, f"rows whose chosen answer is better, or {IGNORE} {name}")


def _others(columns: Columns) -> dict[str, Any]:
    """The columns that nothing has read."""
    return {name: value for name, value in columns.row.items() if name not in columns.used | columns.taken}


def _refuse_other_answers(columns: Columns, keys: list[str | None]) -> None:
    """Another known name of the same answer, with another value, or one with a number: rejected_1."""
    others = _others(columns)
    for key, names in zip(keys, (CHOSEN, REJECTED)):
        plain = [plain_name(name) for name in names]
        for name in others if key in names else ():
            numbered = re.sub(r"s?\d*$", "", plain_name(name)) in plain and name not in names
            if numbered and isinstance(others[name], (str, list)) and others[name] not in (*EMPTY, columns.row[key]):
                found = f"a further answer beside {key}, which is not used here"
                raise UserError(f"column {name}", found, f"a row for each pair, or {IGNORE} {name}")
        for name in names if key in names else ():
            if name in others and others[name] not in EMPTY and others[name] != columns.row[key]:
                raise UserError(f"columns {key} and {name}", "each could be meant", f"{IGNORE} with one of them")


def _refuse_places(columns: Columns, keys: list[str | None], texts: list[str]) -> None:
    """Answers that may be places in a list of another column, or the ends of the names of two columns."""
    where, others = f"columns {' and '.join(map(str, keys))}", _others(columns)
    for name, value in others.items():
        is_list = isinstance(value, list) and all(isinstance(item, (str, list, dict)) for item in value)
        if is_list and all(text.isdecimal() and int(text) <= len(value) for text in texts):
            found = f"numbers, which may be places in column {name}"
            raise UserError(where, found, f"the answers as texts, or {IGNORE} {name}")
    named = [{name.lower().removesuffix(t.lower()): name for name in others if t and name.lower().endswith(t.lower())} for t in texts]  # fmt: skip
    if shared := [stem for stem in named[0] if stem in named[1] and texts[0] != texts[1]]:
        found = f"{texts[0]!r} and {texts[1]!r}, which may name columns {named[0][shared[0]]} and {named[1][shared[0]]}"
        raise UserError(where, found, f"the answers as texts, or {IGNORE} with these columns")

"""Random rows: each is wholly in the ids with the right mask, or refused by one line. No third outcome.

The oracle is independent of the trainer: for each template, a few lines say which pieces of text a conversation is.
A longer search: `THIRD_OUTCOME_EXAMPLES=20000 python -m pytest test/datasets/test_no_third_outcome.py`.
"""

import json
import os
import re
from collections import Counter
from itertools import groupby

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tiny_tokenizers import DATA, bpe, stories, template

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.datasets.shapes import columns as names
from trainer.datasets.shapes import loss_columns
from trainer.errors import UserError

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
EXAMPLES = int(os.environ.get("THIRD_OUTCOME_EXAMPLES", 0))
SOME = {"deadline": None, "derandomize": not EXAMPLES, "suppress_health_check": list(HealthCheck)}
START, END, TOOL = "<|im_start|>", "<|im_end|>", "<|python_tag|>"
CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + "
    "m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "ChatML": template(END),
    "trimmed": template(END, "", "<|im_start|>assistant\\n\\n").replace("m.role + '\\n' + m.content", "m.role + '\\n\\n' + m.content|trim"),
    "calls": CALLS,
}  # fmt: skip
TOKENIZERS = {
    (kind, name): make(text)
    for name, text in TEMPLATES.items()
    for kind, make in (
        ("BPE", lambda text: bpe("<|endoftext|>", text, TOOL)),
        ("SentencePiece", lambda text: stories(text, END, TOOL)),
    )
} if DATA.is_dir() else {}  # fmt: skip
WAYS = [(kind, name) for name in TEMPLATES for kind in ("BPE", "SentencePiece")]

# --- the oracle

ROLES = {
    "user": "user human Human USER prompter",
    "assistant": "assistant gpt bot model AI",
    "system": "system developer",
}
ROLES["tool"] = "tool observation tool_response function"
ROLE = {name: role for role, all_names in ROLES.items() for name in all_names.split()}
ROLE["function_call"] = "assistant"
FLAG_KEYS = ("weight", "loss", "loss_mask", "train", "trainable")
MASKS = ("mask", "skip")  # they may mean that a turn has a loss, or that it has none


def is_trained(message: dict, default: bool) -> bool:
    assert all(message.get(key) is None for key in MASKS), "a key that may exclude a turn was passed over"
    flags = [message[key] for key in FLAG_KEYS if message.get(key) is not None]
    return bool(flags[0]) if flags else default


def understood(messages: list[dict], multiturn: bool) -> list[dict]:
    """Role, text, calls and mark of each turn of an accepted conversation, by the meaning of its keys."""
    turns: list[dict] = []
    for m in messages:
        name = m.get("role") or m.get("from")
        content = next((m[key] for key in ("content", "value") if m.get(key) is not None), "")
        calls = m.get("tool_calls") or []
        if name == "function_call":
            calls, content = json.loads(content), ""
            calls = calls if isinstance(calls, list) else [calls]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        calls = [call.get("function", call) for call in calls]
        calls = [
            (c["name"], json.loads(c["arguments"]) if isinstance(c["arguments"], str) else c["arguments"])
            for c in calls
        ]
        turn = {"role": ROLE[name], "text": content, "calls": calls, "train": is_trained(m, None)}
        before = turns[-1] if turns else {}
        if (
            calls
            and not content
            and before.get("role") == "assistant" == turn["role"]
            and before["train"] == turn["train"]
        ):
            before["calls"] = before["calls"] + calls
        else:
            turns.append(turn)
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    for number, turn in enumerate(turns):
        default = turn["role"] == "assistant" and (multiturn or number == answers[-1])
        turn["train"] = default if turn["train"] is None else turn["train"] and turn["role"] == "assistant"
        turn["train"] = turn["train"] and bool(turn["text"].strip() or turn["calls"])
    return turns


def pieces(name: str, turns: list[dict], opened: bool) -> list[tuple[str, bool, bool]]:
    """(text, whether it is a control token, whether it has a loss) of a conversation."""
    found, gap = [], "\n\n" if name == "trimmed" else "\n"
    for turn in turns:
        body = turn["text"].strip() if name == "trimmed" else turn["text"]
        own = [(body, False)]
        if turn["role"] == "assistant":  # the model may write control tokens that are no marks of turns
            own = [(text, text == TOOL) for text in re.split(f"({re.escape(TOOL)})", body)]
        if name == "calls" and turn["role"] == "assistant":
            own += [(f"<call>{f} {json.dumps(arguments)}</call>", False) for f, arguments in turn["calls"]]
        found += [(START, True, False), (turn["role"] + gap, False, False)]
        found += [(text, control, turn["train"]) for text, control in own] + [(END, True, turn["train"])]
        found += [("" if name == "trimmed" else "\n", False, False)]
    return found + ([(START, True, False), ("assistant" + gap, False, False)] if opened else [])


def ids_and_mask(way: tuple[str, str], turns: list[dict], opened: bool = False) -> tuple[list[int], list[int]]:
    """Plain texts between control tokens are read without control tokens; a token over a border belongs to the answer."""
    tokenizer, ids, mask = TOKENIZERS[way], [], []
    for is_control, group in groupby(pieces(way[1], turns, opened), key=lambda piece: piece[1]):
        group = list(group)
        if is_control:
            ids += [tokenizer.convert_tokens_to_ids(text) for text, _, _ in group]
            mask += [int(trained) for _, _, trained in group]
            continue
        spans, at, text = [], 0, "".join(piece[0] for piece in group)
        for piece, _, trained in group:
            spans += [(at, at + len(piece))] if trained else []
            at += len(piece)
        out = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        ids += out["input_ids"]
        mask += [int(any(a < stop and b > start for start, stop in spans)) for a, b in out["offset_mapping"]]
    return ids, mask


# --- the trainer, on one row


class Rows(list):
    @property
    def column_names(self):
        return list(dict.fromkeys(key for row in self for key in row))

    def rename_column(self, old, new):
        return Rows({new if name == old else name: value for name, value in row.items()} for row in self)

    def select_columns(self, names):
        return Rows({name: row.get(name) for name in names} for row in self)

    def select(self, numbers):
        return Rows(self[number] for number in numbers)

    def add_column(self, name, values, feature):
        return Rows({**row, name: value} for row, value in zip(self, values, strict=True))


def mapped(rows, function, *, folder, key, features, num_proc, **facts):
    return Dataset.from_list([function(row, i, **facts) for i, row in enumerate(rows)], features=features)


COMMON = {
    "flag": "--dataset",
    "input_template": None,
    "apply_chat_template": False,
    "max_len": 4000,
    "map_rows": mapped,
}
TASKS = {
    "sft": (tokenize_sft, {"input_key": None, "output_key": None, "train_on": None, "pretrain_mode": False}),
    "pairs": (
        tokenize_preference,
        {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None},
    ),
    "answer": (tokenize_unpaired, {"prompt_key": None, "completion_key": "completion", "label_key": "label"}),
    "prompt": (tokenize_prompts, {"input_key": None, "label_key": None}),
}
seen: Counter = Counter()


def outcome(task: str, row: dict, way: tuple[str, str], **flags):
    """(sample, lines), or None if the row was refused."""
    function, defaults = TASKS[task]
    try:
        samples, ledger = function(Rows([row]), TOKENIZERS[way], **COMMON | defaults | flags)
    except UserError as error:
        note(str(error))
        assert "\n" not in str(error)
        seen[task, "refused"] += 1
        return None
    seen[task, "taken"] += 1
    return samples[0], "\n".join(ledger.lines)


# --- random conversations

LETTERS = st.text("abcdefgh \n", max_size=8)
TEXTS = st.one_of(
    LETTERS,
    st.text("abcdefgh", min_size=3, max_size=8),
    st.lists(st.sampled_from(["ab", START, END, TOOL, "</s>", "<s>", "<|endoftext|>", " ", "\n", "user\n"]), max_size=4).map("".join),
)  # fmt: skip
CALL = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["add", "tide"]),
        "arguments": st.sampled_from([{}, {"a": 1}, {"port": "Ayr", "n": [1.5]}]),
    }
)
AS_TEXT = CALL.map(lambda call: {**call, "arguments": json.dumps(call["arguments"])})
TOOL_CALLS = st.lists(st.one_of(CALL, AS_TEXT).map(lambda call: {"type": "function", "function": call}), max_size=2)
JSON_CALLS = st.one_of(CALL, AS_TEXT, st.lists(CALL, min_size=1, max_size=2)).map(json.dumps)
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)
CONTENTS = st.one_of(*[TEXTS] * 12, PARTS, st.sampled_from([None, 7, 1.5, True, [], {}]))


ODD_KEYS = st.sampled_from(
    ["weight", "loss", "train", "trainable", "name", "id", "thinking", "mask", "skip", "loss_mask", "prefix", "seed"]
)
FLAGS = st.sampled_from(
    [{}, {}, {"weight": 0}, {"weight": 1}, {"loss": False}, {"train": True, "weight": 1}, {"name": "Bo"}]
)


@st.composite
def message(draw, odd: bool):
    """A message of known names, or an odd one, which may have to be refused."""
    role = draw(
        st.sampled_from(["user", "assistant"] * 12 + [*sorted(ROLE), "critic"] * odd + ["gpt", "Human", "tool"])
    )
    keys = draw(st.sampled_from([("role", "content")] * 6 + [("from", "value")]))
    content = draw(JSON_CALLS if role == "function_call" else CONTENTS if odd else TEXTS)
    made = dict(zip(keys, (role, content), strict=True))
    if odd and draw(st.integers(0, 8)) == 0:
        made[draw(ODD_KEYS)] = draw(st.sampled_from([0, 1, True, False, "", "word"]))
    elif ROLE.get(role) == "assistant":
        made |= draw(FLAGS)
    if role != "function_call" and odd and draw(st.integers(0, 8)) == 0:
        made["tool_calls"] = draw(TOOL_CALLS)
    return made


@st.composite
def conversation(draw):
    """Messages, as Arrow gives them now and then: with the keys of all, and None for missing values."""
    odd = draw(st.booleans())
    messages = draw(st.lists(message(odd), min_size=1, max_size=5))
    if draw(st.booleans()):
        messages += [{"role": "user", "content": "ask"}, {"role": "assistant", "content": draw(TEXTS)}]
    keys = {key for m in messages for key in m} if draw(st.booleans()) else ()
    return [{**dict.fromkeys(keys), **m} for m in messages]


def in_file(messages: list[dict], form: str):
    """The messages as public files have them: a list, its JSON, or an object of lists (Arrow's sequence of objects)."""
    keys = dict.fromkeys(key for message in messages for key in message)
    forms = {"list": messages, "JSON": json.dumps(messages)}
    return (forms | {"object": {key: [message.get(key) for message in messages] for key in keys}})[form]


def count(number: int) -> int:
    return max(EXAMPLES, number)


@settings(max_examples=count(400), **SOME)
@given(conversation(), st.sampled_from(WAYS), st.booleans(), st.sampled_from(["list", "JSON", "object"]))
def test_a_conversation_for_sft(messages, way, multiturn, form):
    found = outcome("sft", {"messages": in_file(messages, form)}, way, train_on="all" if multiturn else "last")
    if found is None:
        return
    turns = understood(messages, multiturn)
    tokenizer = TOKENIZERS[way]
    if len(messages) == 1 and not turns[0]["calls"]:  # a lone answer is a text, with loss on all of it
        plain = [id for id in found[0]["input_ids"] if id not in (tokenizer.bos_token_id, tokenizer.eos_token_id)]
        assert turns[0]["role"] == "assistant" and sum(found[0]["loss_mask"]) >= len(plain)
        return
    last = max(number for number, turn in enumerate(turns) if turn["train"])
    assert ("with messages after the last turn with a loss" in found[1]) == (last + 1 < len(turns))
    assert (found[0]["input_ids"], found[0]["loss_mask"]) == ids_and_mask(way, turns[: last + 1])


@settings(max_examples=count(150), **SOME)
@given(st.integers(0, 3), ODD_KEYS, st.sampled_from([0, 1, True, False]), st.booleans())
def test_a_key_decides_about_its_turn_or_is_refused_or_named(place, key, value, multiturn):
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    messages[place][key] = value
    found = outcome("sft", {"messages": messages}, ("BPE", "ChatML"), train_on="all" if multiturn else "last")
    if found is None:
        return
    turns = understood(messages, multiturn)
    last = max(number for number, turn in enumerate(turns) if turn["train"])
    assert (found[0]["input_ids"], found[0]["loss_mask"]) == ids_and_mask(("BPE", "ChatML"), turns[: last + 1])
    assert key in FLAG_KEYS or f"keys of messages not used: {key}" in found[1]


KEYS = st.sampled_from(["note", "thinking", "thought", "result", "output", "name", "tool_call_id", "from", "reasoning"])


@settings(max_examples=count(250), **SOME)
@given(
    st.sampled_from(["message", "part", "call", "function", "text", "older"]), st.integers(0, 3), KEYS, st.booleans()
)
def test_a_word_under_any_key_is_shown_refused_or_named(where, place, key, is_list):
    function = {"name": "tide", "arguments": {"port": "Ayr"}}
    one = {"type": "function", "function": function}
    talk = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "wait"}]
    talk += [{"role": "assistant", "content": "", "tool_calls": [one]}, {"role": "tool", "content": "2"}]
    talk += [{"role": "assistant", "content": "done"}]
    word = {key: ["SECRET"] if is_list and where != "message" else "SECRET"}
    if where == "part":
        talk[min(place, 1)]["content"] = [{"type": "text", "text": "ask", **word}]
    elif where == "text":
        talk[2] = {"role": "function_call", "content": json.dumps(function | word)}
    elif where == "older":
        talk[2] |= {"function_call": {"name": "SECRET", "arguments": {}}}
    else:
        {"message": talk[place], "call": one, "function": function}[where].update(word)
    found = outcome("sft", {"messages": talk}, ("BPE", "calls"))
    if found is None:
        return
    named = re.search("keys of messages not used: (.*)", found[1])
    text = TOKENIZERS["BPE", "calls"].decode(found[0]["input_ids"])
    assert "SECRET" in text or (named and key in named[1].split(", "))


@settings(max_examples=count(250), **SOME)
@given(conversation(), TEXTS, TEXTS, st.sampled_from(["beside", "whole", "texts", "one"]), st.sampled_from(WAYS))
def test_a_conversation_with_two_answers(messages, good, bad, form, way):
    answers = {"chosen": {"role": "assistant", "content": good}, "rejected": {"role": "assistant", "content": bad}}
    if form == "texts":
        row = {"messages": messages, "chosen": good, "rejected": bad}
    elif form == "one":
        row = {"messages": messages, **answers}
    else:
        whole = messages if form == "whole" else []
        row = {side: [*whole, answer] for side, answer in answers.items()}
        row |= {} if form == "whole" else {"messages": messages}
    found = outcome("pairs", row, way)
    if found is None:
        return
    last = understood(messages[-1:], False)[0]
    if form != "whole" and last["role"] == "assistant":  # it may only be one of the answers, which stands once
        assert last["text"].strip() in (good.strip(), bad.strip()) and not last["calls"]
        messages = messages[:-1]
    for side, answer in answers.items():
        turns = understood([*messages, answer], False)
        for turn in turns[:-1]:
            turn["train"] = False
        assert (found[0][f"{side}_ids"], found[0][f"{side}_mask"]) == ids_and_mask(way, turns), side


@settings(max_examples=count(250), **SOME)
@given(conversation(), st.booleans(), st.sampled_from(WAYS))
def test_a_conversation_as_a_prompt(messages, drops, way):
    found = outcome("prompt", {"messages": messages}, way, drop_answer=drops)
    if found is None:
        return
    last = messages[-1].get("role") or messages[-1].get("from")
    if drops and ROLE[last] == "assistant":
        assert "the last answer is dropped" in found[1]
        messages = messages[:-1]
    turns = understood(messages, False)
    assert turns[-1]["role"] != "assistant"
    assert found[0]["prompt_ids"] == ids_and_mask(way, turns, opened=True)[0]


# --- random columns

WORD = st.text("abcdefgh", min_size=5, max_size=9)
TALK = st.lists(WORD, min_size=2, max_size=2).map(
    lambda words: [{"role": role, "content": word} for role, word in zip(("user", "assistant"), words, strict=True)]
)
ALONE = WORD.map(lambda word: [{"role": "user", "content": word}])
KNOWN = sorted(
    (
        {
            *names.PROMPTS,
            *names.ANSWERS,
            *names.CONVERSATIONS,
            *names.ADDED,
            *names.CHOSEN,
            *names.REJECTED,
            *names.LABELS,
        }
        - {"images"}
    )  # see test_image_samples
    | {"text", "id", "source", "score", "metadata", "systemPrompt", "Question", "instructions", "hint", "passages"}
)
# names whose values change the text: naming them is not enough
CHANGES = {*names.PROMPTS, *names.CONVERSATIONS, *names.SYSTEMS, *names.MORE, names.HISTORY, "text"}
CHANGES |= {"systemPrompt", "Question", "instructions", "hint", "passages", "documents", "choices"}
VALUES = st.one_of(
    *[WORD] * 6, TALK, ALONE, st.sampled_from([None, "", 5, 2.5, True, [], {}]), WORD.map(lambda w: {"key": w})
)
USUAL = {
    "sft": ["instruction output", "question answer", "prompt completion", "messages", "conversations", "text", "input output"],
    "pairs": ["prompt chosen rejected", "question chosen rejected", "chosen rejected", "messages rejected_response"],
    "answer": ["prompt completion label", "question answer label", "messages label", "messages completion label"],
    "prompt": ["messages", "prompt", "question", "prompt answer"],
}  # fmt: skip


@st.composite
def any_row(draw):
    """A task, and a row with its usual columns and a few others."""
    task = draw(st.sampled_from(sorted(USUAL)))
    usual = draw(st.sampled_from(USUAL[task])).split()
    row = {name: draw(VALUES) for name in draw(st.lists(st.sampled_from(KNOWN), max_size=2, unique=True))}
    for name in usual:
        if draw(st.integers(0, 20)) == 0:
            continue
        is_talk = name in ("messages", "conversations")
        row[name] = draw(
            st.booleans() if name == "label" else st.one_of(TALK, ALONE) if is_talk else st.one_of(*[WORD] * 6, VALUES)
        )
    return task, row


def words_of(value) -> set[str]:
    """The texts in a value, but for the names of roles."""
    if isinstance(value, dict):
        return {word for key, child in value.items() if key not in ("role", "from") for word in words_of(child)}
    if isinstance(value, list):
        return {word for child in value for word in words_of(child)}
    return (
        {str(value)} if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "" else set()
    )


@settings(max_examples=count(400), **SOME)
@given(any_row(), st.sampled_from(["BPE", "SentencePiece"]))
def test_a_row_of_any_columns(made, kind):
    """Each column is in the text, or named as not used if it is no known place of a text; the loss is on an answer, never on a question."""
    (task, row), way = made, (kind, "ChatML")
    tokenizer = TOKENIZERS[way]
    found = outcome(task, row, way)
    if found is None:
        return
    sample, lines = found
    unused = set(re.sub(r"\n.*", "", lines.partition("columns not used: ")[2]).split(", "))
    sides = {"sft": [""], "answer": [""], "prompt": ["prompt"], "pairs": ["chosen", "rejected"]}[task]
    texts = {side: tokenizer.decode(sample[f"{side or 'input'}_ids"]) for side in sides}
    for name, value in row.items():
        shown = "".join(texts.values())
        is_text = "text, with loss on every token" in lines
        if name in unused and (name in CHANGES or (is_text and name in names.ANSWERS)):
            assert all(word in shown for word in words_of(value)), f"{name} is only named"
        if name in unused or (name in names.LABELS and task == "answer") or (name in loss_columns.FLAGS and value == 1):
            continue
        for word in words_of(value):
            assert word in shown, f"{name} is neither used nor named"
    if task == "prompt":
        return
    for side in sides:
        ids, mask = sample[f"{side or 'input'}_ids"], sample[f"{side or 'loss'}_mask"]
        trained = tokenizer.decode([id for id, has_loss in zip(ids, mask, strict=True) if has_loss])
        for name in (*names.PROMPTS, *names.SYSTEMS, *names.MORE, names.HISTORY):
            if task == "sft" and "text with loss on every token" in lines:
                continue
            if isinstance(row.get(name), str) and row[name] and name not in unused:
                others = set().union(*(words_of(v) for n, v in row.items() if n != name))
                assert row[name] not in trained or any(row[name] in other for other in others), f"{name} is trained"


def test_each_kind_of_row_was_taken_now_and_then():
    """A search whose rows are all refused finds nothing."""
    assert not seen or all(seen[task, "taken"] for task in TASKS), seen

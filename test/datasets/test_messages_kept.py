"""Each key, call, thought and message of a conversation is in the ids with the right loss, refused, or named with a count."""

import json
from itertools import groupby

import pytest
from datasets import Dataset
from tiny_tokenizers import byte_tokenizer

from trainer.datasets.conversations import training_templates
from trainer.datasets.conversations.messages import messages_of
from trainer.datasets.images.image_marks import with_marks
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.shapes.notes import Notes, summary_of_notes, summed
from trainer.datasets.shapes.read_row import ReadRow
from trainer.datasets.shapes.row_reader import SFT, RowReader
from trainer.errors import UserError

COMMON = {"flag": "--dataset", "input_template": None, "apply_chat_template": False, "max_len": 4000}
TASKS = {
    "sft": (tokenize_sft, {"input_key": None, "output_key": None, "pretrain_mode": False}),
    "pairs": (
        tokenize_preference,
        {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None},
    ),
    "prompt": (tokenize_prompts, {"input_key": None, "label_key": None}),
}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
# it shows thoughts under their key, those of the last turn only
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def mapped(rows, function, *, folder, key, features, num_proc, **facts):
    return Dataset.from_list([function(row, i, **facts) for i, row in enumerate(rows)], features=features)


class Rows(list):
    column_names = ("messages", "chosen", "rejected", "tools")


def lines(name: str, *rows, task: str = "sft", **flags) -> tuple[list, str]:
    """The trained texts of each row, and the lines of the set. `name`: of a template, or its text."""
    template = training_templates.read(name) if name in training_templates.names() else name
    tokenizer, (function, defaults) = byte_tokenizer(template), TASKS[task]
    flags = {"train_on": "last"} | flags if task == "sft" else flags
    data = Rows({"messages": row} if isinstance(row, list) else row for row in rows)
    Rows.column_names = tuple(dict.fromkeys(column for row in data for column in row))
    samples, ledger = function(data, tokenizer, **COMMON | defaults | flags, map_rows=mapped)
    texts = []
    for sample in samples if task == "sft" else []:
        runs = groupby(zip(sample["loss_mask"], sample["input_ids"], strict=True), key=lambda pair: pair[0])
        texts.append([tokenizer.decode([token for _, token in run]) for trained, run in runs if trained])
    return texts, "\n".join(ledger.lines)


def refusal(name: str, *rows, **flags) -> str:
    with pytest.raises(UserError) as error:
        lines(name, *rows, **flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def thinks(number: int, **keys) -> dict:
    return {"role": "assistant", "content": f"a{number}", "reasoning_content": f"T{number}", **keys}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss", "gemma4"])
def test_turns_that_the_template_shows_without_their_thoughts_are_counted(name):
    talk = [USER, thinks(1), USER, thinks(2)]
    texts, said = lines(name, talk, [USER, thinks(3)], train_on="all")
    assert [len(own) for own in texts] == [1, 1] and "a2" in texts[0][0] and "T2" in texts[0][0]
    assert "1 of 3 turns of the assistant have no loss" in said and "--train_on last" in said
    assert "loss on every turn" not in said and "leaves out the thoughts of earlier turns (1 row)" in said
    texts, said = lines(name, talk)
    assert "loss on the last turn" in said and "leaves out the thoughts of earlier turns (1 row)" in said
    assert "turns of the assistant have no loss" not in said
    _, said = lines(name, [USER, thinks(3)], train_on="all")
    assert "loss on every turn of the assistant" in said and "leaves out" not in said
    for train_on in ("last", "all"):
        assert "message 2 as the model writes it, and its key asks for a loss" in refusal(
            name, [USER, thinks(1, weight=1), USER, thinks(2)], train_on=train_on
        )
    row = {"prompt": [USER], "chosen": [thinks(1), USER, thinks(2)], "rejected": [ANSWER]}
    found = refusal(name, row, task="pairs")
    assert "message 2 as the model writes it, and all turns of an answer have a loss: it drops the thoughts" in found
    assert "or answers of one message" in found and "its key" not in found
    assert "leaves out the thoughts of earlier turns (2 rows)" in lines(name, talk[:3], talk[:3], task="prompt")[1]
    row = {"messages": talk[:3], "chosen": "x", "rejected": "y"}
    assert "leaves out the thoughts of earlier turns (1 row)" in lines(name, row, task="pairs")[1]


@pytest.mark.parametrize("task", ["sft", "pairs", "prompt"])
def test_a_key_that_the_template_reads_for_another_role_is_named(task):
    """It shows names of tools only. A name that is shown is used."""
    shows = FORGETFUL.replace("{{ m.content + '<|im_end|>' }}{% endif %}", "{{ m.name if m.role == 'tool' else '' }}"
                              "{{ m.content + '<|im_end|>' }}{% endif %}")  # fmt: skip
    call = {"role": "assistant", "content": "let me"}
    for key, role in (("name", "user"), ("name", "tool")):
        asked = [{**USER, key: "Ada"}] if role == "user" else [USER, call, {"role": "tool", "content": "r", key: "Ada"}]
        row = {"messages": asked} if task == "prompt" else {"messages": [*asked, ANSWER]}
        row = {"prompt": asked, "chosen": [ANSWER], "rejected": [call]} if task == "pairs" else row
        said = lines(shows, row["messages"] if task == "sft" else row, task=task)[1]
        assert ("keys of messages not used: name" in said) is (role == "user"), said


def test_thoughts_in_the_content_are_counted_too():
    think = {"role": "assistant", "content": "<think>\nT1\n</think>\n\na1"}
    texts, said = lines("qwen3", [USER, think, USER, ANSWER], train_on="all")
    assert texts == [["a<|im_end|>"]] and "1 of 2 turns of the assistant have no loss" in said
    assert "leaves out the thoughts of earlier turns (1 row)" in said


def test_a_marked_turn_without_its_thoughts_is_refused():
    assert lines(FORGETFUL, [USER, thinks(1)])[0] == [["<think>T1</think>a1<|im_end|>"]]
    assert "message 2 do not hold its text" in refusal(FORGETFUL, [USER, thinks(1), USER, thinks(2)], train_on="all")


@pytest.mark.parametrize("value", [False, 0, True, 1])
def test_loss_mask_is_read_like_loss_and_other_masks_are_refused(value):
    talk = [USER, {**ANSWER, "content": "bad", "loss_mask": value}, USER, ANSWER]
    assert lines("qwen2_5", talk, train_on="all")[0] == [["bad<|im_end|>", "a<|im_end|>"] if value else ["a<|im_end|>"]]
    for key in ("mask", "masked", "ignore", "skip", "is_masked", "excludeFromLoss", "no-loss", "train_detail"):
        assert f"its key {key!r}" in refusal("qwen2_5", [USER, {**ANSWER, key: value}])
        assert f"its key {key!r}" in refusal("qwen2_5", [{**USER, key: value}, ANSWER])
    assert (
        "keys of messages not used: brain, deleted"
        in lines("qwen2_5", [USER, {**ANSWER, "deleted": value, "brain": 1}])[1]
    )


def call(**keys) -> dict:
    return {"type": "function", "function": {"name": "tide", "arguments": {"port": "Ayr"}, **keys}}


TOOL = [{"type": "function", "function": {"name": "tide", "description": "x", "parameters": {"type": "object", "properties": {}}}}]  # fmt: skip


def test_a_call_that_joins_the_message_before_it_keeps_its_keys():
    calls = {"role": "assistant", "content": "", "reasoning_content": "SECRET", "tool_calls": [call()]}
    row = {"messages": [USER, {"role": "assistant", "content": "let me"}, calls], "tools": TOOL}
    [[text]], _ = lines("qwen3", row)
    assert "SECRET" in text and "let me" in text and "Ayr" in text
    row["messages"][1]["reasoning_content"] = "other"
    assert "'reasoning_content' has another value" in refusal("qwen3", row)


SECRET = "leaves out 'SECRET' of message 2"
CALLS = {
    "thoughts in a text": ({"function_call": json.dumps({"name": "tide", "arguments": {}, "thought": "SECRET"})}, SECRET),
    "thoughts in a role": ({"role": "function_call", "content": json.dumps({"name": "tide", "arguments": {}, "x": "SECRET"})}, SECRET),
    "a result inside": ({"tool_calls": [call(result="SECRET")]}, SECRET),
    "a result beside": ({"tool_calls": [{**call(), "output": {"x": ["SECRET"]}}]}, "leaves out '"),
    "two forms": ({"tool_calls": [call()], "function_call": {"name": "tide", "arguments": {}}}, "both tool_calls and function_call"),
    "a role and calls": ({"role": "function_call", "content": '{"name": "tide"}', "tool_calls": [call()]}, "all calls in one place"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_holds_is_shown_or_refused(name):
    keys, message = CALLS[name]
    row = {"messages": [USER, {"role": "assistant", "content": "", **keys}], "tools": TOOL}
    assert message in refusal("qwen3", row)


def test_a_role_of_calls_may_have_them_under_tool_calls_and_calls_keep_their_ids():
    row = [USER, {"role": "tool_call", "content": None, "tool_calls": [call()]}]
    assert "Ayr" in lines("qwen3", {"messages": row, "tools": TOOL})[0][0][0]
    [message] = messages_of([{"role": "function_call", "content": '{"id": "c1", "name": "f", "arguments": {}}'}], "row")
    [found] = message["tool_calls"]
    assert found["function"]["id"] == "c1" and found["function"]["name"] == "f"


def test_keys_of_other_roles_are_refused_or_named():
    result = {"role": "tool", "content": "2 m", "tool_call_id": "c1"}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, result, ANSWER]
    assert "keys of messages not used: tool_call_id" in lines("qwen3", {"messages": talk, "tools": TOOL})[1]
    for number in (0, 2):
        others = [{**m, "reasoning_content": "T"} if n == number else m for n, m in enumerate(talk)]
        assert "'reasoning_content' has thoughts of the role" in refusal("qwen3", {"messages": others, "tools": TOOL})
    assert "keys of messages not used: from" in lines("qwen3", [{**USER, "from": "Bob"}, ANSWER])[1]


def test_messages_behind_the_last_loss_are_counted():
    more = [USER, ANSWER, USER]
    _, said = lines("qwen2_5", [USER, ANSWER], more, [*more, {**ANSWER, "train": False}], train_on="all")
    assert "2 rows end with messages after the last turn with a loss, which are left out" in said
    assert "end with messages" not in lines("qwen2_5", [USER, ANSWER])[1]


def test_parts_follow_one_rule_with_and_without_images():
    part = {"type": "text", "text": "q"}
    for images in (0, 1):
        for extra, message in (({"thinking": "T"}, "'thinking'"), ({"mask": False}, "'mask'")):
            with pytest.raises(UserError, match=message):
                read_parts([{**part, **extra}], images)
        assert read_parts([{**part, "cache_control": 1}], images) == {"cache_control"}
    with pytest.raises(UserError, match="a text in a part of an image"):
        read_parts([part], 1, text="SECRET")


def read_parts(parts: list[dict], images: int, **keys) -> set[str]:
    """The keys that are named, of a message with these parts."""
    notes = Notes()
    message = {"role": "user", "content": [*parts, *[{"type": "image", **keys}] * images]}
    row = ReadRow({"prompt": [message]}, {}, {"prompt": "column messages"}, True, notes)
    messages_of(with_marks(row, (), images)["prompt"] if images else [message], "row", notes, "")
    return notes.keys


def test_pairs_that_begin_with_a_role():
    wanted = [{"role": r, "content": t} for r, t in (("system", "be nice"), ("user", "q"), ("assistant", "a"))]
    assert messages_of([["system", "be nice"], ["q", "a"]], "row") == wanted
    assert messages_of([["system", "be nice"], ["human", "q"], ["gpt", "a"]], "row") == wanted
    for talk in ([["q", "a"], ["ai", "b"]], [["user", "q"], ["q", "a"]], [["q", "a"], ["system", "x"]]):
        with pytest.raises(UserError, match="may be a role or a question"):
            messages_of(talk, "row")


def test_a_lone_answer_that_becomes_a_text_keeps_its_keys_or_is_refused():
    reader = RowReader(SFT)
    read = reader.read({"messages": [{**ANSWER, "id": "x"}]})
    assert read["text"] == "a" and read.notes.keys == {"id"}
    with pytest.raises(UserError, match="does not read its key 'reasoning_content'"):
        reader.read({"messages": [{**ANSWER, "reasoning_content": "SECRET"}]})


def test_counts_are_added_up_over_rows():
    def note(*facts):
        return Notes("rows", facts=set(facts)).as_text()

    some, none = (summed("{} of {} x", n, 2, without="all x") for n in (1, 0))
    assert summary_of_notes([note(some, "y")] * 3 + [note(none)]) == (["rows", "y", "3 of 8 x"], set())
    assert summary_of_notes([note(none, summed("{:row}"))] * 2)[0] == ["rows", "2 rows", "all x"]


@pytest.mark.parametrize("call", [{"type": "function"}, {"function": {}}, {"name": None}, {"function": {"name": " "}}])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_a_call_without_a_name_is_refused(call, key):
    value = [call] if key == "tool_calls" else {"arguments": {}, **call}
    with pytest.raises(UserError, match="rows message 1: a call of a tool"):
        messages_of([{"role": "assistant", "content": "", key: value}], "rows", template="m.tool_calls")

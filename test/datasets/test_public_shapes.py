"""Public shapes of rows: each gives the ids and the mask that a few lines over the tokenizer give for its conversation.

A file in `public_shapes` has rows, and what they mean: [role, text, 1 if it is trained], in our own words.
"""

import gzip
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shape_reference import DATA, FOLDER, MARKS, SHAPES, expected, tokenizer_of

from trainer.datasets.conversations.messages import messages_of, tools_of
from trainer.datasets.files.loading import load_rows
from trainer.datasets.rows import AsWritten
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.datasets.shapes.columns import TOOLS, Columns
from trainer.datasets.shapes.references import lack_references
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments, SFTDataArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.flags.rules import refuse
from trainer.rollout.rewards.math_reward import math_reward
from trainer.runs.run_data import sft_options

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
COMMON = {"flag": "--dataset", "input_template": None, "apply_chat_template": False, "max_len": 512}
FLAGS = {
    "sft": {"input_key": None, "output_key": None, "train_on": None, "pretrain_mode": False},
    "pairs": {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None},
    "answer": {"prompt_key": None, "completion_key": "completion", "label_key": "label"},
    "prompt": {"input_key": None, "label_key": None},
}
COMMANDS = {"sft": "train_sft", "pairs": "train_dpo", "answer": "train_dpo --loss kto", "prompt": "train_ppo"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TASKS = {"sft": tokenize_sft, "pairs": tokenize_preference, "answer": tokenize_unpaired, "prompt": tokenize_prompts}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


def tokenize(task: str, rows: list[dict], folder: Path, kind: str, has_tools: bool = False, **flags):
    return tokenize_files(
        task, {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}, folder, kind, has_tools, **flags
    )


def tokenize_files(task: str, files: dict[str, str], folder: Path, kind: str, has_tools: bool, **flags):
    """The samples of the files, or of those that the pattern `dataset` names."""
    for name, text in files.items():
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    loaded = load_rows(str(folder / flags.pop("dataset", "rows.jsonl")), flag="--dataset", split="train")
    return TASKS[task](loaded, tokenizer_of(kind, has_tools), **COMMON | FLAGS[task] | flags)


def start_of_table_row(shape: dict) -> str:
    """The first two cells of a shape in the table of the page: its columns, and the command with its flags."""
    flags = "".join(f" --{flag}" + ("" if value is True else f" {value}") for flag, value in shape["flags"].items())
    flags = flags.replace("--drop_answer", "--teacher MODEL").replace("--needs_labels", "--reward_func math")
    columns = ", ".join(f"`{column}`" for column in shape["rows"][0])
    return f"| {columns} | `{COMMANDS[shape['task']]}{flags}` | "


def test_the_page_has_a_row_for_each_shape_and_no_other():
    table = PAGE.read_text().split("<!-- shapes -->\n")[1].split("\n<!-- /shapes -->")[0].splitlines()
    starts = {start_of_table_row(json.loads((FOLDER / f"{name}.json").read_text())) for name in SHAPES}
    assert {row[: row.rindex("| ", 0, -2) + 2] for row in table[2:]} == starts


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_public_shape_is_its_conversation(name, kind, tmp_path):
    shape = json.loads((FOLDER / f"{name}.json").read_text())
    task = shape["task"]
    files = shape.get("files") or {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in shape["rows"])}
    options = {"dataset": shape.get("dataset", "rows.jsonl"), **shape["flags"]}
    samples, ledger = tokenize_files(task, files, tmp_path, kind, "tools" in shape["rows"][0], **options)
    assert len(samples) == len(shape["want"])
    if "labels" in shape:
        assert samples["label"][:] == shape["labels"]
    said = ledger.lines[0].partition(" of them: ")[2] or ledger.lines[0]
    assert f"{start_of_table_row(shape)}{said} |" in PAGE.read_text()
    for sample, want in zip(samples, shape["want"], strict=True):
        if task == "pairs":
            for side, turns in want.items():
                assert (sample[f"{side}_ids"], sample[f"{side}_mask"]) == expected(kind, turns), side
        elif task == "prompt":
            labels = [text for role, text, _ in want if role == "label"]
            assert sample["prompt_ids"] == expected(kind, [t for t in want if t[0] != "label"], opened=True)[0]
            assert sample["label"] == (labels[0] if labels else None)
        else:
            assert (sample["input_ids"], sample["loss_mask"]) == expected(kind, want)


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("train_on", [None, "last", "all"])
def test_train_on_says_which_turns_have_a_loss_and_keys_of_messages_go_over_it(kind, train_on, tmp_path):
    texts = ["Fog?", "Maybe", "Sure?", "Yes", "And rain?", "No"]
    for keys in (
        {},
        {1: {"train": False}},
        {5: {"weight": 0}, 3: {"weight": 1}},
        {5: {"loss": False}, 1: {"loss": True}},
    ):
        turns = []
        for number, text in enumerate(texts):
            has_loss = number % 2 == 1 and (train_on == "all" or number == 5)
            for value in keys.get(number, {}).values():
                has_loss = bool(value)
            turns.append([["user", "assistant"][number % 2], text, int(has_loss)])
        last = max(number for number, turn in enumerate(turns) if turn[2])
        row = {"messages": [{"role": r, "content": t, **keys.get(n, {})} for n, (r, t, _) in enumerate(turns)]}
        [sample], ledger = tokenize("sft", [row], tmp_path, kind, train_on=train_on)
        assert (sample["input_ids"], sample["loss_mask"]) == expected(kind, turns[: last + 1])
        said = "every turn of the assistant" if train_on == "all" else "the last turn of the assistant (--train_on all:"
        assert f"loss on {said}" in "\n".join(ledger.lines)


def test_train_on_where_it_would_do_nothing_is_refused(tmp_path):
    for flags in ({"pretrain_mode": True, "input_key": "q"}, {"input_key": "q", "output_key": "a"}):
        with pytest.raises(UserError, match=r"^--train_on last with"):
            tokenize("sft", [{"q": "a", "a": "b"}], tmp_path, "BPE", train_on="last", **flags)
    with pytest.raises(UserError, match="--train_on last with --multiturn: it means --train_on all"):
        refuse("train_sft", SFTArguments(sft=SFTDataArguments(train_on="last", multiturn=True)))
    assert sft_options(SFTDataArguments(multiturn=True)) == sft_options(SFTDataArguments(train_on="all"))
    for command in (DPOArguments, RMArguments):
        with pytest.raises(UserError, match="--train_on: no such flag; --train_on is a flag of train_sft"):
            parse_arguments(command, "train_dpo", ["--train_on", "all"])


def test_a_column_of_verdicts_that_is_named_as_the_answer_is_the_answer(tmp_path):
    flags = {"input_key": "text", "output_key": "label", "apply_chat_template": True}
    [sample], _ = tokenize("sft", [{"text": "Is it even?", "label": "False"}], tmp_path, "BPE", **flags)
    turns = [["user", "Is it even?", 0], ["assistant", "False", 1]]
    assert (sample["input_ids"], sample["loss_mask"]) == expected("BPE", turns)


def lines(rows, folder, **flags):
    return "\n".join(tokenize("sft", rows, folder, "BPE", **flags)[1].lines)


def test_what_is_recognised_and_not_used_is_said(tmp_path):
    row = {"instruction": "a", "input": "b", "output": "c", "id": 1, "source": "s"}
    found = lines([row], tmp_path)
    assert "alpaca rows: instruction + input -> user, output -> assistant" in found
    assert "columns not used: id, source" in found and "loss on the last turn of the assistant" in found
    named = {"messages": [{"role": "user", "content": "a", "name": "Bo"}, {"role": "assistant", "content": "b"}]}
    assert "keys of messages not used: name" in lines([named], tmp_path)
    plain = lines([{"q": "a", "a": "b"}], tmp_path, input_key="q", output_key="a")
    assert "no chat template is applied" in plain and "q -> prompt, a -> answer" in plain


ANSWERED = {"prompt": {}, "sft": {"completion": "Yes"}, "pairs": {"chosen": "Yes", "rejected": "No"},
            "answer": {"completion": "Yes", "label": True}}  # fmt: skip
AS_RENDERED = "prompts that are rendered by the chat template already stay texts"


def ids_of(task: str, prompt: str, kind: str, folder: Path, **flags) -> tuple[list[int], str]:
    [sample], ledger = tokenize(task, [{"prompt": prompt, **ANSWERED[task]}], folder, kind, **flags)
    column = {"prompt": "prompt_ids", "pairs": "chosen_ids"}.get(task, "input_ids")
    return sample[column], "\n".join(ledger.lines)


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("task", TASKS)
def test_all_commands_read_a_text_under_prompt_alike(task, kind, tmp_path, monkeypatch):
    """Turns without a flag; texts where a flag names them, around them is a template, or they are rendered already."""
    tokenizer, (head, end) = tokenizer_of(kind, False), MARKS[kind]
    answer = [] if task == "prompt" else [["assistant", "Yes", 1]]
    turns = expected(kind, [["user", "Fog?", 0], *answer], opened=task == "prompt")[0]
    assert ids_of(task, "Fog?", kind, tmp_path)[0] == turns

    def plain(text: str) -> list[int]:
        text += "" if task == "prompt" else "Yes"
        return tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * bool(answer)

    named = {"sft": {"input_key": "prompt", "output_key": "completion"}, "prompt": {"input_key": "prompt"}}
    ids, said = ids_of(task, "Fog?", kind, tmp_path, **named.get(task, {"prompt_key": "prompt"}))
    assert ids == plain("Fog?") and "no chat template is applied" in said
    assert ids_of(task, "Fog?", kind, tmp_path, input_template="Q: {}\n")[0] == plain("Q: Fog?\n")
    rendered = f"{head}user\nFog?{end}\n{head}assistant\n"
    for reads in (False, True):
        monkeypatch.setattr(tokenizer, "reads_control_tokens", reads, raising=False)
        ids, said = ids_of(task, rendered, kind, tmp_path)
        assert AS_RENDERED in said and "no chat template is applied" not in said
        assert ("control tokens, read as plain text" in said) is not reads
        whole = rendered + (f"Yes{end}\n" if answer else "")  # the answer ends as those of the template do
        assert (ids == tokenizer(whole)["input_ids"]) is reads
    asked = f"What is {end}?"  # it only holds a control token
    assert ids_of(task, asked, kind, tmp_path)[0] == expected(kind, [["user", asked, 0], *answer], task == "prompt")[0]


def talk(*messages, **others):
    return {"messages": [{"role": "user", "content": "a"}, *messages], **others}


ANSWER = {"role": "assistant", "content": "b"}
REFUSED = {
    "an unknown role": (
        talk({"role": "narrator", "content": "x"}, ANSWER),
        "message 2: no role was recognised: narrator",
    ),
    "thoughts": (talk({**ANSWER, "thinking": "x"}), "message 2: the chat template does not read its key 'thinking'"),
    "a part": (talk({"role": "user", "content": [{"type": "audio", "audio": "x"}]}, ANSWER), "a part of type 'audio'"),
    "a share": (talk({**ANSWER, "weight": 0.5}), "weight is 0.5"),
    "two roles": (talk({**ANSWER, "from": "human"}), "message 2: two roles: assistant and human"),
    "details of thoughts": (talk({**ANSWER, "reasoning_details": [{"text": "x"}]}), "its key 'reasoning_details'"),
    "a chain of thought": ({"question": "a", "answer": "b", "cot": "x"}, "column cot: would change the text"),
    "an address of an image": (talk(ANSWER, image_url="http://x/a.png"), "column image_url: would change the text"),
    "another conversation": (
        talk(ANSWER, conversations=[{"from": "human", "value": "c"}]),
        "column conversations: another text than that of messages",
    ),
    "another question": (talk(ANSWER, prompt="c"), "column prompt: another text than that of messages"),
    "another question to the answer": (
        {"messages": [{"role": "user", "content": "a"}], "instruction": "c", "answer": "b"},
        "column instruction: another text than that of messages",
    ),
    "another spelling of a question": (talk(ANSWER, Prompt="c"), "column Prompt: another text than that of messages"),
    "a text beside": ({"question": "a", "answer": "b", "text": "c"}, "column text: another text than that of question"),
    "a text or a question": (
        {"text": "a", "completion": "b"},
        "(allowed: --input_key text --output_key completion, or --ignore_columns completion)",
    ),
    "a verdict on a text": ({"text": "a", "label": False}, "column label: says whether the answer is good"),
    "a verdict as a number": (talk(ANSWER, label=0), "column label: says whether the answer is good"),
    "another spelling of system": (talk(ANSWER, systemPrompt="x"), "(allowed: the name system_prompt, or --ignore"),
    "passages": ({"question": "a", "answer": "b", "passages": ["x"]}, "column passages: would change the text"),
    "a choice": ({"question": "a", "answer": "b", "A": "x"}, "column A: would change the text"),
    "no question": ({"question": None, "answer": "b"}, "question: no value (allowed: a question before"),
    "no messages": ({"messages": [], "id": 1}, "--input_key messages: no value"),
    "turns that wait": (
        {"context": [{"role": "user", "content": "a"}], "response1": "b"},
        "column context: its last turn has no answer",
    ),
    "videos": (talk(ANSWER, videos=["a.mp4"]), "column videos: would change the text"),
    "a video": (talk(ANSWER, video="a.mp4"), "column video: would change the text"),
    "audios": (talk(ANSWER, audios=["a.wav"]), "column audios: would change the text"),
    "context": (talk(ANSWER, context="x"), "column context: would change the text"),
    "two answers": (
        {"question": "a", "answer": "b", "response": "c"},
        "columns response and answer: each could be meant",
    ),
    "two systems": (
        talk(ANSWER, system="x", system_prompt="y"),
        "columns system and system_prompt: each could be meant (allowed: --ignore_columns with one of them)",
    ),
    "pairs": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "train_dpo or train_rm for pairs"),
    "nothing": ({"foo": "b"}, "nothing says what to learn from the columns foo"),
    "a bad answer": (talk(ANSWER, label=False), "column label: says whether the answer is good"),
    "a bad answer as a text": (talk(ANSWER, label="False"), "column label: says whether the answer is good"),
    "not a number": ({"question": "a", "answer": float("nan")}, "column answer: nan, a number"),
    "a weight": (talk(ANSWER, weight=0.5), "would change the loss"),
    "an article": ({"article": "x", "question": "a", "answer": "b"}, "column article: would change the text"),
    "thoughts beside": ({"thinking": "x", "question": "a", "answer": "b"}, "column thinking: would change the text"),
    "one message of a tree": ({"text": "b", "role": "prompter"}, "column role: would change the text"),
    "no answer": ({"question": "a", "answer": None}, "column answer: no value"),
    "texts as an answer": ({"question": "a", "answer": ["b", "c"]}, "column answer: a list of texts"),
    "two texts": (talk({**ANSWER, "value": "c"}), "message 2: two different texts"),
    "a mask": (talk({**ANSWER, "mask": True}), "message 2: the chat template does not read its key 'mask'"),
    "tools of a message": (
        talk({**ANSWER, "tools": "[]x"}),
        "message 2: the chat template does not read its key 'tools'",
    ),
    "a broken call": (talk({"role": "function_call", "content": "tide()"}), "a call of a tool that cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_text_is_refused_with_the_row(name, tmp_path):
    row, message = REFUSED[name]
    with pytest.raises(UserError) as error:
        tokenize("sft", [{"messages": [{"role": "user", "content": "a"}, ANSWER]}, row], tmp_path, "BPE")
    assert str(error.value).startswith("--dataset row 2: ") and message in str(error.value)
    assert "\n" not in str(error.value)


QUESTION = [{"role": "user", "content": "a"}]
OTHERS_REFUSED = {
    "another prompt": ("pairs", {"messages": QUESTION, "prompt": "c", "chosen": "b", "rejected": "d"},
                       "column prompt: another text than that of messages"),
    "no prompt": ("pairs", {"messages": [], "chosen": "b", "rejected": "d"}, "column messages: no value"),
    "another question": ("answer", {**talk(ANSWER), "question": "c", "label": True}, "column question: another text"),
    "no answer": ("answer", {**talk(ANSWER, QUESTION[0]), "label": True},
                  "--prompt_key messages: does not end with an assistant message"),
    "labels of pairs": ("answer", {"prompt": "a", "chosen": "b", "rejected": "d", "label": 1},
                        "column label: a label of its own"),
    "a prompt beside": ("prompt", {"messages": QUESTION, "question": "c"}, "column question: another text"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS_REFUSED)
def test_other_commands_refuse_it_too(name, tmp_path):
    task, row, message = OTHERS_REFUSED[name]
    with pytest.raises(UserError) as error:
        tokenize(task, [row], tmp_path, "BPE")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["sft", "answer", "pairs", "prompt"])
@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_an_empty_conversation_is_no_value(name, task, tmp_path):
    answers = {"sft": {"answer": "b"}, "answer": {"answer": "b", "label": True}, "prompt": {}}
    row = {name: [], "question": "a", **answers.get(task, {"chosen": "b", "rejected": "d"})}
    [sample], _ = tokenize(task, [row], tmp_path, "BPE")
    want = expected("BPE", [["user", "a", 0], *[["assistant", "b", 1]] * (task != "prompt")], opened=task == "prompt")
    ids = {"pairs": "chosen_ids", "prompt": "prompt_ids"}.get(task, "input_ids")
    assert sample[ids] == want[0]


def test_ignored_columns_and_keys_are_left_out(tmp_path):
    row = talk({**ANSWER, "thinking": "x"}, videos=["a.mp4"])
    [sample], _ = tokenize("sft", [row], tmp_path, "BPE", ignore_columns="videos, thinking")
    assert (sample["input_ids"], sample["loss_mask"]) == expected("BPE", [["user", "a", 0], ["assistant", "b", 1]])


def test_a_whole_conversation_that_contradicts_its_prompt_is_refused(tmp_path):
    sides = {side: talk({**ANSWER, "content": side})["messages"] for side in ("chosen", "rejected")}
    with pytest.raises(UserError, match=r"row 1: column prompt: its turns are not those"):
        tokenize("pairs", [{"prompt": "another", **sides}], tmp_path, "BPE")


def test_what_is_left_of_an_object_is_refused_or_named(tmp_path):
    inner = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "tide"}], "seed": 1}
    row, key = {"input": inner, "output": "b"}, {"input_key": "input.messages", "output_key": "output"}
    flags = {**key, "apply_chat_template": True}
    with pytest.raises(UserError, match=r"row 1: column input\.tools: would change the text"):
        tokenize("sft", [row], tmp_path, "BPE", **flags)
    found = lines([row], tmp_path, **flags, ignore_columns="input.tools")
    assert "columns not used: input.seed" in found


UNREAD = {
    "glaive": ("sft", {"system": "SYSTEM: x", "chat": "USER: a"}, "columns system, chat: rows of this shape", "tool_calls"),
    "Nectar": ("pairs", {"prompt": "a", "answers": [{"answer": "b", "rank": 1}]}, "columns prompt, answers", "better rank"),
    "HelpSteer2": ("pairs", {"prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": 1},
                   "columns response_1, response_2", "preference_strength"),
    "HelpSteer3": ("sft", {"context": [{"role": "user", "content": "a"}], "response1": "b", "response2": "c"},
                   "columns response1, response2", "overall_preference"),
    "Arena": ("answer", {"winner": "model_a", "conversation_a": [], "conversation_b": [], "label": 1},
              "columns conversation_a, conversation_b, winner", "is chosen"),
    "PRM800K": ("sft", {"question": {"problem": "a"}, "label": {"steps": []}}, "question: an object", "question.problem names"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_public_set_that_is_not_read_says_which_rows_to_write(name, tmp_path):
    task, row, found, allowed = UNREAD[name]
    with pytest.raises(UserError) as error:
        tokenize(task, [row], tmp_path, "BPE")
    line = str(error.value)
    assert found in line and allowed in line.partition("(allowed: ")[2] and "\n" not in line


def test_marks_of_images_that_no_column_has_are_counted(tmp_path):
    rows = [{"question": "<image> What?", "answer": "b"}, {"question": "<video>?", "answer": "b"}]
    found = lines([*rows, {"question": "a", "answer": "b"}], tmp_path)
    assert "WARNING: 2 rows hold <image>, <video> as plain text" in found
    assert "WARNING" not in lines([{"question": "a", "answer": "b"}], tmp_path)


def test_functions_are_tools():
    tide = {"name": "tide", "description": "x", "parameters": {"type": "object", "properties": {}}}
    wanted = [{"type": "function", "function": tide}]
    for tools in ([tide], json.dumps([tide]), wanted, tide, [json.dumps(tide)]):
        assert tools_of({"tools": tools}) == wanted
    columns = Columns({"functions": [tide]})
    assert columns.find(TOOLS) == "functions"


def test_a_call_has_arguments_under_either_name_or_none():
    found = []
    for given in ({"arguments": {"a": None}}, {"parameters": {"a": None}}, {"arguments": None}, {}):
        for call in ({"name": "tide", **given}, {"id": "x", "function": {"name": "tide", **given}}):
            [message] = messages_of(as_in_a_file([{"role": "assistant", "content": "", "tool_calls": [call]}]), "row")
            [call] = message["tool_calls"]
            assert call.get("id") == ("x" if "function" in call else None)
            assert call.get("function", call)["name"] == "tide"
            found.append(call.get("function", call)["arguments"])
    assert found == [{"a": None}] * 4 + [{}] * 4


def as_in_a_file(value):
    return json.loads(json.dumps(value), object_hook=AsWritten)


@pytest.mark.parametrize("task", ["pairs", "answer", "sft"])
def test_two_answers_in_a_row_are_refused(task, tmp_path):
    row = {**talk(ANSWER), "completion": "c"}
    row |= {"label": 1} if task == "answer" else {"chosen": "c", "rejected": "d"}
    keys = {"input_key": "messages", "output_key": "completion", "apply_chat_template": True} if task == "sft" else {}
    with pytest.raises(UserError, match=r"row 1: --(input|prompt)_key messages: ends with an assistant message"):
        tokenize(task, [row], tmp_path, "BPE", **keys)


def test_places_of_answers_in_a_list_are_no_answers_and_an_empty_question_is_none(tmp_path):
    row = {"prompt": "a", "responses": ["b", "c"], "chosen": 0, "rejected": 1}
    with pytest.raises(UserError, match="row 1: columns chosen and rejected: numbers, which may be places in column"):
        tokenize("pairs", [row], tmp_path, "BPE")
    tokenize("pairs", [{**row, "chosen": 12, "rejected": 13}], tmp_path, "BPE")
    [sample], _ = tokenize("sft", [{"instruction": "", "input": "a", "output": "b"}], tmp_path, "BPE")
    assert (sample["input_ids"], sample["loss_mask"]) == expected("BPE", [["user", "a", 0], ["assistant", "b", 1]])


def test_a_verl_file_gives_the_math_reward_its_answers(tmp_path):
    """A struct of a Parquet file: the label is the text under its key, so right answers score 1."""
    texts = pa.array(["12", "1,200", "-3"])
    turns = pa.array([[{"role": "user", "content": f"{n}*4?"}] for n in range(3)])
    rewards = pa.StructArray.from_arrays([pa.array(["rule"] * 3), texts], ["style", "ground_truth"])
    table = pa.table({"data_source": ["sums"] * 3, "prompt": turns, "reward_model": rewards, "ability": ["math"] * 3})
    pq.write_table(table, tmp_path / "verl.parquet")
    rows = load_rows(str(tmp_path / "verl.parquet"), flag="--dataset", split="train")
    flags = COMMON | FLAGS["prompt"] | {"needs_labels": True}
    prompts, ledger = tokenize_prompts(rows, tokenizer_of("BPE"), **flags)
    assert (labels := prompts["label"][:]) == texts.to_pylist()
    assert ledger.lines[:2] == [
        "rows: prompt -> turns, reward_model.ground_truth -> label of the reward",
        "columns not used: ability, data_source, reward_model.style",
    ]
    right, wrong = ["3*4 is 12", "#### 1200", "\\boxed{-3}"], ["3*4 is 13", "#### 12", "\\boxed{3}"]
    assert math_reward([""] * 3, right, labels) == [1, 1, 1] and math_reward([""] * 3, wrong, labels) == [0, 0, 0]


def test_an_object_is_no_label_to_compare_with(tmp_path):
    row = {"prompt": [{"role": "user", "content": "3*4?"}], "reward_model": {"style": "rule", "ground_truth": "12"}}
    with pytest.raises(UserError, match=r"row 1: --label_key reward_model: an object.*reward_model\.ground_truth"):
        tokenize("prompt", [row], tmp_path, "BPE", label_key="reward_model", needs_labels=True)
    for value, kind in ((["12", "twelve"], "a list"), (True, "a boolean")):
        with pytest.raises(UserError, match=f"row 1: --label_key gold: {kind}, not an answer"):
            tokenize("prompt", [{**row, "gold": value}], tmp_path, "BPE", label_key="gold", needs_labels=True)
    for text in ("[1, 2]", "true"):  # a text is an answer, whatever it looks like
        flags = {"label_key": "gold", "needs_labels": True}
        assert tokenize("prompt", [{**row, "gold": text}], tmp_path, "BPE", **flags)[0]["label"][:] == [text]


def test_a_label_without_a_flag_has_one_sure_place(tmp_path):
    """Rows without one are refused before they are tokenized, and a file of JSON lines at the door, before torch."""

    def labels(*rows, **flags):
        return tokenize("prompt", list(rows), tmp_path, "BPE", **{"needs_labels": True, **flags})[0]["label"][:]

    row, path = {"question": "3*4?"}, str(tmp_path / "rows.jsonl")
    assert labels({**row, "final_answer": "12"}, {**row, "final_answer": "13"}) == ["12", "13"]
    both = {**row, "reward_model": {"ground_truth": "12"}, "final_answer": "13"}
    with pytest.raises(UserError, match=r"^--label_key: missing, and reward_model.ground_truth and final_answer are"):
        labels(both)
    assert not lack_references(path) and not lack_references(f"{path}#1,{tmp_path}/other.jsonl")
    assert labels(both, ignore_columns="final_answer") == labels(both, label_key="reward_model.ground_truth") == ["12"]
    for other in ({"answer": "12"}, {"solution": "It is 12."}, {"reward_model": '{"ground_truth": "12"}'}):
        with pytest.raises(UserError, match=f"^--label_key: missing: .* .allowed: question, {next(iter(other))}.$"):
            labels(row | other)
        assert lack_references(path) and lack_references(f"{path}#1") and not lack_references(str(tmp_path))
    may = {"needs_labels": False, "takes_labels": True}  # code of a user, as that of verl
    assert labels(both, ignore_columns="final_answer", **may) == ["12"]
    assert (
        labels(both, **may) == labels(row, **may) == labels(row | {"ground_truth": "1"}, needs_labels=False) == [None]
    )
    assert labels(row | {"ground_truth": "1"}, taken=["ground_truth"], **may) == [None]
    odd = {**row, "ground_truth": float("inf")}  # a guess refuses no row
    samples, ledger = tokenize("prompt", [{**row, "ground_truth": 1.5}, odd], tmp_path, "BPE", **may)
    assert samples["label"][:] == ["1.5", None]
    assert "ground_truth is taken for no label in 1 row; --label_key ground_truth says why" in ledger.lines
    for flags in ({"label_key": "ground_truth", **may}, {"needs_labels": True}):
        with pytest.raises(UserError, match="row 1: --label_key ground_truth"):
            labels(odd, **flags)
    for text in ("[1]\n", "{", ""):  # its reader says what is wrong with it
        Path(path).write_text(text)
        assert not lack_references(path)


def test_a_key_inside_a_text_is_refused(tmp_path):
    row = {"prompt": [{"role": "user", "content": "3*4?"}], "reward_model": '{"ground_truth": "12"}'}
    with pytest.raises(UserError, match="row 1: column reward_model: a text, so it has no key 'ground_truth'"):
        tokenize("prompt", [row], tmp_path, "BPE", label_key="reward_model.ground_truth")


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_numbers_of_few_bits_are_no_text(kind, tmp_path):
    """A reader makes 64 bits of them: 0.1 would be trained as 0.10000000149011612."""
    for value, is_exact in ((0.1, False), (2.25, True), (-0.5, True)):
        values = pa.array(np.array([value], kind))
        pq.write_table(pa.table({"question": ["a"], "answer": values}), tmp_path / "x.parquet")
        rows = load_rows(str(tmp_path / "x.parquet"), flag="--dataset", split="train")
        if is_exact:
            [sample], _ = tokenize_sft(rows, tokenizer_of("BPE"), **COMMON | FLAGS["sft"])
            assert (sample["input_ids"], sample["loss_mask"]) == expected(
                "BPE", [["user", "a", 0], ["assistant", str(value), 1]]
            )
        else:
            with pytest.raises(UserError, match=r"row 1: column answer: 0\.(1|09).*the number as a text"):
                tokenize_sft(rows, tokenizer_of("BPE"), **COMMON | FLAGS["sft"])


def test_a_number_of_64_bits_with_the_digits_of_32_is_as_written(tmp_path):
    """0.1 with 32 bits has these digits. Written as text, or as a decimal of a column, they are meant."""
    digits = "0.10000000149011612"
    (tmp_path / "x.jsonl").write_text(f'{{"question": "a", "answer": {digits}}}\n')
    pq.write_table(pa.table({"question": ["a"], "answer": [float(digits)]}), tmp_path / "x.parquet")
    pq.write_table(pa.table({"question": ["a"], "answer": [Decimal(digits)]}), tmp_path / "y.parquet")
    wanted = expected("BPE", [["user", "a", 0], ["assistant", digits, 1]])
    labels = {"apply_chat_template": True, "label_key": "answer", "needs_labels": True}
    for name in ("x.jsonl", "x.parquet", "y.parquet"):
        rows = load_rows(str(tmp_path / name), flag="--dataset", split="train")
        [sample], _ = tokenize_sft(rows, tokenizer_of("BPE"), **COMMON | FLAGS["sft"])
        assert (sample["input_ids"], sample["loss_mask"]) == wanted, name
        [prompt], _ = tokenize_prompts(rows, tokenizer_of("BPE"), **COMMON | FLAGS["prompt"] | labels)
        assert prompt["label"] == digits
    for value in (date(2026, 1, 2), b"12"):
        pq.write_table(pa.table({"question": ["a"], "answer": [value]}), tmp_path / "z.parquet")
        rows = load_rows(str(tmp_path / "z.parquet"), flag="--dataset", split="train")
        with pytest.raises(UserError, match=r"row 1: --label_key answer: .* \(allowed: a text\)"):
            tokenize_prompts(rows, tokenizer_of("BPE"), **COMMON | FLAGS["prompt"] | labels)
    reward = pa.array([{"ground_truth": 0.1}], pa.struct([("ground_truth", pa.float32())]))
    pq.write_table(pa.table({"question": ["a"], "reward": reward}), tmp_path / "w.parquet")
    rows = load_rows(str(tmp_path / "w.parquet"), flag="--dataset", split="train")
    with pytest.raises(UserError, match=r"row 1: --label_key reward\.ground_truth: 0\.1.*the number as a text"):
        labels["label_key"] = "reward.ground_truth"
        tokenize_prompts(rows, tokenizer_of("BPE"), **COMMON | FLAGS["prompt"] | labels)


def test_numbers_and_labels_of_a_csv_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected,gap,label\na,b,c,0.5,TRUE\n")
    rows, flags = load_rows(str(path), flag="--dataset", split="train"), COMMON | {"apply_chat_template": True}
    pairs, _ = tokenize_preference(rows, tokenizer_of("BPE"), **flags | FLAGS["pairs"] | {"margin_key": "gap"})
    assert pairs["margin"][:] == [0.5]
    for gap in (" ", "inf", "wide"):
        row = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": gap}
        with pytest.raises(UserError, match=r"row 1: --margin_key gap: .* \(allowed: a number\)"):
            tokenize("pairs", [row], tmp_path, "BPE", margin_key="gap")
    [answer], _ = tokenize_unpaired(rows, tokenizer_of("BPE"), **flags | FLAGS["answer"] | {"completion_key": "chosen"})
    assert answer["label"] is True
    with pytest.raises(UserError, match="row 1: --label_key label: 'good' "):
        tokenize("answer", [{"prompt": "a", "completion": "b", "label": "good"}], tmp_path, "BPE")


def test_what_is_said_of_answers_that_teach_nothing_or_repeat_their_prompt(tmp_path):
    row = {"prompt": "a b", "chosen": "c", "rejected": "c"}
    with pytest.raises(UserError, match=r"no pair is left .*\(allowed: answers that differ\)"):
        tokenize("pairs", [row], tmp_path, "BPE")
    twice = {"prompt": "a b", "chosen": "a b c", "rejected": "a b d"}
    said = "answers that begin with the text of their prompt keep it, so it is there twice"
    assert said in tokenize("pairs", [twice], tmp_path, "BPE")[1].lines
    assert said not in tokenize("pairs", [{**twice, "rejected": "d"}], tmp_path, "BPE")[1].lines


def test_a_template_without_tools_is_named_as_the_cause(tmp_path):
    call = {"role": "function_call", "content": '{"name": "tide", "arguments": {}}'}
    row = talk(call, {"role": "observation", "content": "2"}, ANSWER, tools=[{"name": "tide"}])
    with pytest.raises(UserError, match="row 1: the chat template: does not show the tool 'tide'"):
        tokenize("sft", [row], tmp_path, "BPE", train_on="all")

"""Refusals of odd files say where, what was found there, and what to do."""

import json
import re

import datasets
import pytest
from tiny_tokenizers import byte_tokenizer, template

from trainer.datasets.files.loading import load_rows
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.errors import UserError

COMMON = {"flag": "--dataset", "max_len": 500, "input_template": None, "apply_chat_template": False}
SFT = {"input_key": None, "output_key": None, "train_on": None, "pretrain_mode": False}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OF_SFT = {
    "nested": ([{"messages": [[USER, ANSWER]]}], "row 1: .*message 1: no role, in a list of object"),
    "other keys": ([{"messages": [{"speaker": "user", "text": "q"}, ANSWER]}], "no role, in an object with the keys speaker, text"),
    "a text": ([{"messages": [USER, "a"]}], "message 2: no role, in the string 'a'"),
    "nothing": ([{"messages": [USER, None]}], "message 2: no role, in no value"),
    "no content": ([{"messages": [USER, {"role": "assistant", "content": None}]}], "not a text: no value"),
    "a number": ([{"messages": [USER, {"role": "assistant", "content": 42}]}], "not a text: the number '42'"),
    "texts": ([{"messages": [USER, {"role": "assistant", "content": ["a"]}]}], "not a text: a list of string"),
    "an object": ([{"messages": [USER, {"role": "assistant", "content": {"t": "a"}}]}], "an object with the keys t"),
    "a part": ([{"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}, ANSWER]}], "type 'text' without a text, an object with the keys type, text"),
    "no JSON": ([{"messages": "[{'role': 'user'}]"}], r"a text that is no JSON of a list: .*\(allowed: a list of messages with role and content, or its JSON"),
    "a name in capitals": ([{"Prompt": "a", "Completion": "b"}], r"\(allowed: --input_key Prompt --output_key Completion;"),
    "roles as columns": ([{"user": "a", "assistant": "b"}], r"\(allowed: --input_key user --output_key assistant;"),
    "input of a batch": ([{"input": {"messages": [USER, ANSWER]}}], r"row 1: column input: an object with the keys messages \(allowed: --input_key input.messages\)"),
    "body of a batch": ([{"url": "/v1", "body": {"model": "m", "messages": [USER, ANSWER]}}], r"nothing says what .* url, body \(allowed: --input_key body.messages\)"),
    "a pair": ([{"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}], r"no sample is left: .*\(allowed: train_dpo or train_rm for pairs"),
    "prompts": ([{"messages": [USER]}], r"no sample is left: .*train_ppo for prompts alone\)"),
    "another conversation": ([{"dialog": [USER, ANSWER]}], r"\(allowed: --input_key dialog --apply_chat_template for"),
}  # fmt: skip
OF_PROMPTS = {
    "no known name": ([{"src": "a", "tgt": "b"}], r"^--input_key: missing, .*\(allowed: one of src, tgt\)"),
    "spaces": ([{"prompt": "  "}], r"\(allowed: prompts that are not empty\)"),
    "an answer": ([{"messages": [USER, ANSWER]}], "row 1: .*ends with an assistant message .*rows without that message"),
    "another place": ([{"data": {"messages": [USER]}}], r"row 1: column data: no prompt \(allowed: --input_key data.messages\)"),
    "body of a batch": ([{"body": {"messages": [USER]}}], r"^--input_key: missing, .*\(allowed: --input_key body.messages\)"),
    "input of a batch": ([{"input": {"messages": [USER]}}], r"row 1: column input: .*\(allowed: --input_key input.messages\)"),
}  # fmt: skip
OF_FILES = {
    "lists": (json.dumps([[USER]]), "item 1: a list, not an object with keys .allowed: one object in each line"),
    "lines of lists": (f"{json.dumps([USER])}\n" * 2, "line 2: broken JSON .*allowed: one object in each line"),
    "two kinds": ('{"a": "b"}\n{"a": [1]}\n', "line 2: 'a' is a list here .*allowed: values of one kind in a column"),
    "Parquet": ("PAR1\x15\x04", r"rows.jsonl: a Parquet file .allowed: a name that ends in .parquet"),
    "zip": ("PK\x03\x04", "rows.jsonl: a zip archive, or a table of Excel"),
    "twice": ('{"a": 1, "a": 2}\n', "line 1: .*allowed: each key once"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def refusal(folder, text, tokenize, **flags) -> str:
    path = folder / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        rows = load_rows(str(path), flag="--dataset", split="train")
        tokenize(rows, byte_tokenizer(template("<|im_end|>")), **COMMON, **flags)
    return str(error.value)


def test_named_answers_of_pairs_that_are_cut_off_need_a_longer_max_len(tmp_path):
    text = json.dumps({"prompt": "a" * 600, "chosen": "b", "rejected": "c"})
    found = refusal(tmp_path, text, tokenize_sft, **SFT | {"input_key": "prompt", "output_key": "chosen"})
    assert re.search(r"1 is cut off .*\(allowed: answers that fit into --max_len 500\)", found)


@pytest.mark.parametrize("name", OF_SFT)
def test_rows_of_train_sft(name, tmp_path):
    rows, found = OF_SFT[name]
    assert re.search(found, refusal(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), tokenize_sft, **SFT))


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_rows_of_prompts(name, tmp_path):
    rows, found = OF_PROMPTS[name]
    flags = {"input_key": None, "label_key": None}
    assert re.search(
        found, refusal(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), tokenize_prompts, **flags)
    )


@pytest.mark.parametrize("name", OF_FILES)
def test_files(name, tmp_path):
    text, found = OF_FILES[name]
    assert re.search(found, refusal(tmp_path, text, tokenize_sft, **SFT))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/none")
    found = refusal(tmp_path, json.dumps({"text": "a"}), tokenize_sft, **SFT)
    assert found.startswith("HF_HOME: /proc/none cannot be made or written")


def test_the_flag_of_a_conversation_inside_an_object_reads_it(tmp_path):
    tokenizer, answers = (
        byte_tokenizer(template("<|im_end|>")),
        ({"preferred_output": [ANSWER]}, {"non_preferred_output": [ANSWER | {"content": "b"}]}),
    )
    pairs = {"chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None, "prompt_key": None}
    asked = datasets.Dataset.from_list([{"input": {"messages": [USER]}, **answers[0], **answers[1]}])
    with pytest.raises(UserError, match=r"row 1: column input: .*\(allowed: --prompt_key input.messages\)"):
        tokenize_preference(asked, tokenizer, **COMMON, **pairs)
    [pair], _ = tokenize_preference(asked, tokenizer, **COMMON, **pairs | {"prompt_key": "input.messages"})
    whole = datasets.Dataset.from_list([{"input": {"messages": [USER, ANSWER]}}])
    [sample], _ = tokenize_sft(whole, tokenizer, **COMMON, **SFT | {"input_key": "input.messages"})
    assert sample["input_ids"] == pair["chosen_ids"] and sample["loss_mask"] == pair["chosen_mask"]


@pytest.mark.parametrize("prompt", ["", " ", "\n\n"])
def test_prompts_without_a_word_are_counted_and_used_as_they_are(prompt):
    tokenizer = byte_tokenizer(template("<|im_end|>"))
    rows = datasets.Dataset.from_list([{"prompt": text, "completion": "b"} for text in (prompt, "a", prompt)])
    samples, ledger = tokenize_sft(rows, tokenizer, **COMMON, **SFT)
    assert "WARNING: 2 rows have a prompt without a word, used as it is" in ledger.lines
    assert f"<|im_start|>user\n{prompt}<|im_end|>" in tokenizer.decode(samples[0]["input_ids"])


ADDED = ["knowledge", "background", "facts", "table", "schema", "rationale", "thought_process", "prefix", "suffix"]


@pytest.mark.parametrize("name", [*ADDED, "choice_a", "option_d", "optionA", "opa", "Rationale"])
def test_columns_beside_a_question_that_belong_to_its_text_are_refused(name):
    rows = datasets.Dataset.from_list([{"question": "Which?", "answer": "A", name: "a text"}])
    tokenizer = byte_tokenizer(template("<|im_end|>"))
    with pytest.raises(UserError, match=rf"row 1: column {name}: would change the text.*--ignore_columns {name}\)"):
        tokenize_sft(rows, tokenizer, **COMMON, **SFT)
    assert len(tokenize_sft(rows, tokenizer, **COMMON, **SFT, ignore_columns=name)[0]) == 1
    repeated = datasets.Dataset.from_list([{"question": "Which? a text", "answer": "A", name: "a text"}])
    assert f"columns not used: {name}" in tokenize_sft(repeated, tokenizer, **COMMON, **SFT)[1].lines

"""Rows of preferences whose answers or labels another column puts in doubt are refused by their number."""

import datasets
import pytest
from tiny_tokenizers import DATA, bpe, template

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
COMMON = {"flag": "--dataset", "prompt_key": None, "input_template": None, "apply_chat_template": False, "max_len": 99}
COMMON |= {"chosen_key": "chosen", "rejected_key": "rejected"}
KTO = {"completion_key": "completion", "label_key": "label"}
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
ONE = {"prompt": "q", "completion": "good", "label": True}
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good", "label": False}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def tokenize(task: str, row: dict, **flags):
    tokenizer = bpe("<|endoftext|>", template("<|im_end|>"))
    call, keys = (tokenize_unpaired, KTO) if task == "kto" else (tokenize_preference, {"margin_key": None})
    keys = keys | ({"scored": True} if task == "rm" else {})
    return call(datasets.Dataset.from_list([row]), tokenizer, **COMMON | keys | flags)


PLACES = {"prompt": "q", "chosen": 0, "rejected": 1}
BESIDE = "columns chosen and rejected: "
REFUSED = [
    ("dpo", {**PLACES, "response_0": "good", "response_1": "bad"}, f"{BESIDE}'0' and '1', which may name columns response_0"),
    ("rm", {**PLACES, "chosen": "A", "rejected": "b", "Reply A": "x", "reply B": "y"}, f"{BESIDE}'A' and 'b', which may name"),
    ("dpo", {**PAIR, "chosen": "reply_a", "rejected": "reply_b", "reply_a": "x", "reply_b": "y"}, f"{BESIDE}'reply_a' and "),
    ("kto", {**PLACES, "chosen": "1", "rejected": "2", "replies": ["x", "y"]}, f"{BESIDE}numbers, which may be places in"),
    ("dpo", {**PAIR, "chosen_response": "other"}, "columns chosen and chosen_response: each could be meant"),
    ("kto", {**PAIR, "rejected_response": "other"}, "columns rejected and rejected_response: each could be meant"),
    ("dpo", {**PAIR, "label": 0}, "column label: 0 may say that the chosen answer is not the better one"),
    ("rm", {**PAIR, "tie": True}, "column tie: True may say"),
    ("dpo", {**PAIR, "preference": "rejected"}, "column preference: 'rejected' may say"),
    ("dpo", {"chosen": "\n\nHuman: q\n\nAssistant: good\n\nHuman: z", "rejected": "\n\nHuman: q\n\nAssistant: bad\n\nHuman: z"},
     "--chosen_key chosen: begins with Human: and does not end with a turn of Assistant:"),
    ("kto", {"messages": TALK, "label": True}, "--prompt_key messages message 2 label: False contradicts the label"),
    ("kto", {**ONE, "response": "other"}, "columns response and completion: each could be meant"),
]  # fmt: skip


@pytest.mark.parametrize("task,row,said", REFUSED)
def test_a_doubtful_row_is_refused(task, row, said):
    with pytest.raises(UserError) as error:
        tokenize(task, row)
    assert str(error.value).startswith(f"--dataset row 1: {said}") and "\n" not in str(error.value)


TAKEN = [
    ("dpo", {**PAIR, "chosen": "12", "rejected": "13", "tags": ["a", "b"]}),
    ("dpo", {**PAIR, "chosen": "1", "rejected": "2", "scores": [0.5, 0.1, 0.2]}),
    ("dpo", {**PAIR, "chosen_response": "good", "rejected_response": None, "label": 1, "tie": False, "winner": "chosen"}),
    ("kto", {**ONE, "response": "good", "output": ""}),
    ("kto", {"messages": [TALK[0], {**TALK[1], "label": True}], "label": True}),
    ("dpo", {**PAIR, "margin": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("task,row", TAKEN)
def test_other_columns_do_no_harm(task, row):
    assert len(tokenize(task, row)[0]) == 1


def test_a_flag_says_which_of_two_answers_is_meant():
    [sample], ledger = tokenize("kto", {**ONE, "response": "other"}, completion_key="response")
    assert "columns not used: completion" in ledger.lines
    assert len(sample["input_ids"]) == len(tokenize("kto", {**ONE, "completion": "other"})[0][0]["input_ids"])

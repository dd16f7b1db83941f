"""Columns that say whether a row is trained are used by train_sft, and refused elsewhere if they would change the loss."""

import datasets
import pytest
from tiny_tokenizers import byte_tokenizer, template

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.shapes.loss_columns import FLAGS
from trainer.errors import UserError

COMMON = {"flag": "--dataset", "max_len": 500, "input_template": None, "apply_chat_template": False}
SFT = {"input_key": None, "output_key": None, "train_on": None, "pretrain_mode": False}
PAIRS = {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None}
TALK = [{"role": "user", "content": "Fog?"}, {"role": "assistant", "content": "Maybe"}]
SHAPES = {
    "chat": ({"messages": TALK}, {}),
    "columns": ({"prompt": "Fog?", "completion": "Maybe"}, {}),
    "text": ({"text": "Maybe"}, {}),
    "pretrain": ({"text": "Maybe"}, {"pretrain_mode": True}),
    "keys": ({"q": "Fog?", "a": "Maybe"}, {"input_key": "q", "output_key": "a"}),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))


def sft(rows, **flags):
    tokenizer = byte_tokenizer(template("<|im_end|>"))
    return tokenize_sft(datasets.Dataset.from_list(rows), tokenizer, **COMMON, **SFT | flags)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FLAGS)
def test_a_row_that_a_column_leaves_out_has_no_loss(name, shape):
    row, flags = SHAPES[shape]
    for yes, no in ((True, False), (1, 0), ("true", "False"), (1.0, 0.0)):
        samples, ledger = sft([row | {name: yes}, row | {name: no}], **flags)
        assert samples["row"] == [0] and ledger["num_excluded"] == 1
        assert f"column {name} leaves 1 of 2 rows out of the loss" in ledger.lines
        assert "not used" not in "\n".join(ledger.lines)
    samples, ledger = sft([row | {name: True}], **flags)
    assert sum(samples[0]["loss_mask"]) and f"column {name} leaves no row out of the loss" in ledger.lines


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [0.5, [0, 1], "assistant", 2])
@pytest.mark.parametrize("name", ["loss", "weight", "loss_mask", "lossWeight"])
def test_another_value_is_refused_with_the_cure(name, value, shape):
    row, flags = SHAPES[shape]
    found = rf"row 1: column {name}: .* would change the loss.*; or --ignore_columns {name}\)"
    with pytest.raises(UserError, match=found):
        sft([row | {name: value}], **flags)
    sft([row | {name: value}], ignore_columns=name, **flags)


def test_two_columns_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="columns train, weight: contradict each other"):
        sft([{"text": "a", "train": True, "weight": 0}])


def test_other_names_of_a_loss_are_refused_if_they_would_change_it():
    row = {"messages": TALK}
    for name, value in (("skip", True), ("excluded", True), ("include_loss", False), ("is_masked", "true")):
        with pytest.raises(UserError, match=f"column {name}: .* would change the loss"):
            sft([row | {name: value}])
        _, ledger = sft([row | {name: not value if isinstance(value, bool) else "false"}])
        assert f"columns not used: {name}" in ledger.lines
    for name, value in (("dropout", 0.1), ("skills", True), ("lossy", "a text"), ("weight_kg", 71)):
        _, ledger = sft([row | {name: value}])
        assert f"columns not used: {name}" in ledger.lines


def test_pairs_and_prompts_take_only_values_that_change_nothing():
    tokenizer = byte_tokenizer(template("<|im_end|>"))
    kinds = (
        (tokenize_preference, PAIRS, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (tokenize_prompts, {"input_key": None, "label_key": None}, {"prompt": "a"}),
    )
    for tokenize, flags, row in kinds:
        for name in FLAGS:
            _, ledger = tokenize(datasets.Dataset.from_list([row | {name: 1}]), tokenizer, **COMMON, **flags)
            assert f"columns not used: {name}" in ledger.lines
            for value in (0, False, 0.25):
                with pytest.raises(UserError, match=f"column {name}: .* would change the loss"):
                    tokenize(datasets.Dataset.from_list([row | {name: value}]), tokenizer, **COMMON, **flags)

"""Columns that say whether a row is trained are used by train_sft, and refused elsewhere if they would change the loss."""

import datasets
import pytest
from tiny_tokenizers import byte_tokenizer, template

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.unpaired import tokenize_unpaired
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


@pytest.mark.parametrize(
    "name", ["train_on_turns", "loss_turns", "prompt_mask", "masked_turns", "token_weights_of_answer"]
)
def test_a_list_of_numbers_that_speaks_of_the_loss_is_refused(name):
    row = {"messages": TALK}
    for value in ([0], [1, 0], [0.5], [True, False]):
        with pytest.raises(
            UserError, match=rf"row 1: column {name}: .* would change the loss.*--ignore_columns {name}\)"
        ):
            sft([row | {name: value}])
        sft([row | {name: value}], ignore_columns=name)
    for value in ([1, 1], [1.0], ["web"]):  # all tokens, or a text about the data
        assert f"columns not used: {name}" in sft([row | {name: value}])[1].lines
    with pytest.raises(UserError, match="column chosen_mask"):
        pairs("dpo", {"chosen_mask": [0, 1]})


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


@pytest.mark.parametrize("task", ["dpo", "rm", "kto"])
@pytest.mark.parametrize(
    "name", ["chosen_weight", "rejected_weight", "weight_chosen", "pair_weight", "chosen_loss_mask"]
)
def test_the_weight_of_an_answer_is_refused_if_it_is_not_1(task, name):
    for value in (0.0, 0.5, [0, 1], False):
        with pytest.raises(
            UserError, match=rf"row 1: column {name}: .* would change the loss.*--ignore_columns {name}\)"
        ):
            pairs(task, {name: value})
        pairs(task, {name: value}, ignore_columns=name)
    assert f"columns not used: {name}" in "\n".join(pairs(task, {name: 1.0}).lines)
    assert "chosen_logprob" in "\n".join(pairs(task, {"chosen_logprob": -3.5}).lines), "no weight"


@pytest.mark.parametrize("task", ["dpo", "rm", "kto"])
@pytest.mark.parametrize("name", ["rejected_1", "rejected2", "chosen_2", "rejecteds", "rejected_response_1"])
def test_a_further_answer_is_refused(task, name):
    for value in ("another", ["another"], [{"role": "assistant", "content": "another"}]):
        with pytest.raises(UserError, match=rf"row 1: column {name}: a further answer .*--ignore_columns {name}\)"):
            pairs(task, {name: value})
        pairs(task, {name: value}, ignore_columns=name)
    for value in ("", None, 7):  # a number is a score
        pairs(task, {name: value})
    assert name in "\n".join(pairs(task, {name: 7}).lines)


def test_a_margin_is_used_by_its_flag_or_refused_in_train_rm():
    for name, value in (("margin", 0.5), ("margins", "0.5"), ("Margin", -1)):
        with pytest.raises(UserError, match=rf"row 1: column {name}: .* would change the loss.*--margin_key {name} "):
            pairs("rm", {name: value})
        pairs("rm", {name: value}, ignore_columns=name)
        pairs("rm", {name: value}, margin_key=name)
        assert name in "\n".join(pairs("dpo", {name: value}).lines), "no loss of train_dpo has the margin of a row"
    assert "margin" in "\n".join(pairs("rm", {"margin": 0}).lines)


def pairs(task, more, **flags):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"} | more
    flags = {"completion_key": "completion", "label_key": "label", **COMMON, **PAIRS} | flags
    if task == "kto":
        tokenize = tokenize_unpaired
        del flags["margin_key"]
    else:
        tokenize, flags = tokenize_preference, flags | {"scored": task == "rm"}
        del flags["completion_key"], flags["label_key"]
    rows = datasets.Dataset.from_list([row])
    return tokenize(rows, byte_tokenizer(template("<|im_end|>")), **flags)[1]

"""Pairs: what becomes of each kind of row, and what a micro-batch of them holds."""

import copy
import json

import pytest
from datasets import Dataset

from trainer.datasets.batches.packing import IGNORE
from trainer.datasets.batches.sequence_split import split_micro_batch
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.samples.preference import collate_pairs, render_pair, tokenize_preference
from trainer.errors import UserError

OPTIONS = {
    "flag": "--dataset", "prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None,
    "input_template": None, "apply_chat_template": False, "max_len": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("preference") / "demo"
    make_demo(str(folder))
    return AutoTokenizer.from_pretrained(folder / "model")


def tokenize(tokenizer, rows, **options):
    return tokenize_preference(Dataset.from_list(rows), tokenizer, **{**OPTIONS, **options})


def texts(tokenizer, pair) -> list[tuple[str, str]]:
    """(whole text, text of the loss tokens) of both sides."""
    found = []
    for side in ("chosen", "rejected"):
        ids, mask = pair[f"{side}_ids"], pair[f"{side}_mask"]
        found.append((tokenizer.decode(ids), tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])))
    return found


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_whole_texts_have_no_mean_over_the_answer(tokenizer):
    rows = [{"chosen": "2 1 1 2", "rejected": "2 1 2 1"}]
    with pytest.raises(UserError, match="--prompt_key: missing with --loss simpo"):
        tokenize(tokenizer, rows, mean_flag="--loss simpo")
    assert tokenize(tokenizer, rows)[1]["num_samples"] == 1
    with_prompts = [{"prompt": "Sort: 2 1", "chosen": " 1 2", "rejected": " 2 1"}]
    assert tokenize(tokenizer, with_prompts, mean_flag="--loss simpo")[1]["num_samples"] == 1


def test_plain_texts(tokenizer):
    row = {"prompt": "Sort: 2 1", "chosen": " 1 2", "rejected": " 2 1"}
    pairs, ledger = tokenize(tokenizer, [row], prompt_key="prompt")
    assert texts(tokenizer, pairs[0]) == [
        ("Sort: 2 1 1 2<|im_end|>", " 1 2<|im_end|>"),
        ("Sort: 2 1 2 1<|im_end|>", " 2 1<|im_end|>"),
    ]
    assert pairs[0]["num_tokens"] == len(pairs[0]["chosen_ids"]) + len(pairs[0]["rejected_ids"])
    assert (pairs[0]["num_loss_tokens"], ledger["num_samples"], ledger["num_truncated"]) == (1, 1, 0)


def test_tools_of_a_row_are_shown_on_both_sides(tokenizer):
    with_tools = copy.copy(tokenizer)
    with_tools.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    row = {"prompt": [user("2 1")], "chosen": [assistant("1 2")], "rejected": [assistant("2 1")]}
    pairs, _ = tokenize(with_tools, [{**row, "tools": [{"n": 1}]}])
    bare, _ = tokenize(tokenizer, [row])
    for (shown, answer), (text, same_answer) in zip(texts(tokenizer, pairs[0]), texts(tokenizer, bare[0]), strict=True):
        assert (shown, answer) == ('[{"n": 1}]' + text, same_answer)


def test_every_form_of_a_conversation_is_the_same_pair(tokenizer):
    forms = [
        {"prompt": [user("2 1")], "chosen": [assistant("1 2")], "rejected": [assistant("2 1")]},
        {"prompt": [user("2 1")], "chosen": "1 2", "rejected": "2 1"},
        {"chosen": [user("2 1"), assistant("1 2")], "rejected": [user("2 1"), assistant("2 1")]},
    ]
    found = [tokenize(tokenizer, [form])[0][0] for form in forms]
    found.append(
        tokenize(tokenizer, [{"prompt": "2 1", "chosen": "1 2", "rejected": "2 1"}], apply_chat_template=True)[0][0]
    )
    assert found[0] == found[1] == found[2] == found[3]
    assert texts(tokenizer, found[0])[0] == (
        "<|im_start|>user\n2 1<|im_end|>\n<|im_start|>assistant\n1 2<|im_end|>\n",
        "1 2<|im_end|>",
    )
    assert "chosen: <|im_start|>user\n2 1<|im_end|>\n<|im_start|>assistant\n[[1 2<|im_end|>]]" in render_pair(
        found[0], tokenizer
    )


def test_pairs_that_teach_nothing_are_counted_by_cause_and_left_out(tokenizer):
    long = "1 " * 100
    rows = [
        {"prompt": "a", "chosen": " 1", "rejected": " 2"},
        {"prompt": "a", "chosen": " 1", "rejected": " 1"},
        {"prompt": "a", "chosen": " ", "rejected": " 1"},
        {"prompt": long, "chosen": " 1", "rejected": " 2"},
        {"prompt": "a", "chosen": long + "1", "rejected": long + "2"},  # the same up to the cut
        {"prompt": "a", "chosen": long + "1", "rejected": " 2"},
    ]
    pairs, ledger = tokenize(tokenizer, rows)
    assert list(pairs["row"]) == [0, 5]
    counts = (
        ledger["num_rows"],
        ledger["num_identical"],
        ledger["num_empty"],
        ledger["num_cut_away"],
        ledger["num_truncated"],
    )
    assert counts == (6, 1, 1, 2, 3)
    cut = pairs[1]["chosen_ids"]
    assert len(cut) == 64 and cut[-1] != tokenizer.eos_token_id  # a cut answer is not taught as finished


def test_an_empty_answer_in_a_conversation_is_not_replaced_by_an_earlier_turn(tokenizer):
    prompt = [user("2 1"), assistant("1 2"), user("3 1")]
    rows = [{"prompt": prompt, "chosen": "1 3", "rejected": ""}, {"prompt": prompt, "chosen": "1 3", "rejected": "3 1"}]
    _, ledger = tokenize(tokenizer, rows)
    assert (ledger["num_empty"], ledger["num_samples"]) == (1, 1)


def test_margins(tokenizer):
    rows = [{"prompt": "a", "chosen": " 1", "rejected": " 2", "gap": 0.75}]
    assert tokenize(tokenizer, rows, margin_key="gap")[0][0]["margin"] == 0.75
    assert tokenize(tokenizer, rows)[0][0]["margin"] == 0
    rows[0]["gap"] = "much"
    with pytest.raises(UserError, match="row 1: --margin_key gap"):
        tokenize(tokenizer, rows, margin_key="gap")


def test_wrong_rows_are_named(tokenizer):
    with pytest.raises(UserError, match="--chosen_key"):
        tokenize(tokenizer, [{"prompt": "a", "better": "b", "rejected": "c"}])
    rows = [{"chosen": [user("a"), assistant("1")], "rejected": [user("b"), assistant("2")]}]
    with pytest.raises(UserError, match=r"row 1.*differ before their last message"):
        tokenize(tokenizer, rows)
    with pytest.raises(UserError, match=r"row 1.*does not end with an assistant message"):
        tokenize(tokenizer, [{"chosen": [user("a")], "rejected": [user("a")]}])
    with pytest.raises(UserError, match="no pair is left"):
        tokenize(tokenizer, [{"prompt": "a", "chosen": "b", "rejected": "b"}])


PAIRS = [
    {"chosen_ids": [5, 6, 7], "chosen_mask": [0, 0, 1], "rejected_ids": [5, 8], "rejected_mask": [0, 1], "margin": 0.5, "row": 0},
    {"chosen_ids": [9, 1], "chosen_mask": [0, 1], "rejected_ids": [9, 2, 3, 4], "rejected_mask": [0, 1, 1, 1], "margin": 0, "row": 1},
]  # fmt: skip


def test_collation_of_pairs():
    padded = collate_pairs(PAIRS, 0, packed=False)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 0], [9, 1, 0, 0], [5, 8, 0, 0], [9, 2, 3, 4]]
    assert padded["is_last"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    packed = collate_pairs(PAIRS, 0, packed=True)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 9, 1, 5, 8, 9, 2, 3, 4]]
    assert packed["sequence_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]]
    assert packed["is_last"].tolist() == [[0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1]]
    assert packed["margins"].tolist() == [0.5, 0.0]


@pytest.mark.parametrize("packed", [False, True])
def test_sums_by_sequence_survive_padding_packing_and_splitting(packed):
    from trainer.models.losses.sequence_sums import sum_by_sequence

    whole = collate_pairs(PAIRS, 0, packed=packed)
    parts = [split_micro_batch(whole, rank, 2) for rank in range(2)]
    for batch in ([whole], parts):
        targets = sum(
            sum_by_sequence((part["labels"] != IGNORE) * part["labels"], part["sequence_ids"], 4, None)
            for part in batch
        )
        assert targets.tolist() == [7, 1, 8, 9]
        last = sum(sum_by_sequence(p["input_ids"] * p["is_last"], p["sequence_ids"], 4, None) for p in batch)
        assert last.tolist() == [7, 1, 8, 4]


def test_no_pair_is_a_token_without_target():
    for packed in (False, True):
        batch = collate_pairs([], 0, packed=packed)
        assert batch["input_ids"].shape == (1, 1) and (batch["labels"] == IGNORE).all()
        assert not batch["is_last"].any() and batch["margins"].shape == (0,)


def test_real_conversations(tokenizer, shared_data):
    lines = (shared_data / "oasst100" / "pairs.jsonl").read_text().splitlines()[:40]
    rows = [json.loads(line) for line in lines]
    pairs, ledger = tokenize(tokenizer, rows, max_len=4096)
    assert ledger["num_rows"] == 40 and ledger["num_samples"] == len(pairs) > 30
    for pair in pairs:
        for (_, trained), side in zip(texts(tokenizer, pair), ("chosen", "rejected"), strict=True):
            assert trained == rows[pair["row"]][side] + "<|im_end|>"


@pytest.mark.parametrize("row", [{"messages": [user("2 1"), assistant("1 2")]}, {"question": "2 1", "answer": "1 2"}])
def test_rows_without_a_second_answer_are_sent_to_the_command_that_reads_them(tokenizer, row):
    found = rf"--dataset columns {', '.join(row)}: no column is known as the rejected answer \(allowed: --rejected_key .*train_sft"
    with pytest.raises(UserError, match=found):
        tokenize(tokenizer, [row])

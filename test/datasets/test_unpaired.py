"""Single answers: what becomes of each kind of row, and which prompts and answers KTO's KL estimate puts together."""

import pytest
import torch
from datasets import Dataset

from trainer.datasets.batches.global_batches import GlobalBatchLoader
from trainer.datasets.batches.sequence_split import natural_order, split_micro_batch
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.unpaired import collate_unpaired, render_answer, tokenize_unpaired
from trainer.errors import UserError

OPTIONS = {"flag": "--dataset", "prompt_key": None, "input_template": None, "apply_chat_template": False, "max_len": 32}
KEYS = {"completion_key": "completion", "label_key": "label"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("unpaired") / "demo"
    make_demo(str(folder))
    return AutoTokenizer.from_pretrained(folder / "model")


def test_rows_and_ledger(tokenizer):
    rows = [
        {"prompt": "Sort: 2 1", "completion": " 1 2", "label": True},
        {"prompt": "Sort: 2 1", "completion": " 2 1", "label": False},
        {"prompt": "Sort: 2 1", "completion": " ", "label": False},
        {"prompt": "1 " * 40, "completion": " 1", "label": True},
    ]
    options = {**OPTIONS, **KEYS, "prompt_key": "prompt"}
    samples, ledger = tokenize_unpaired(Dataset.from_list(rows), tokenizer, **options)
    assert list(samples["label"]) == [True, False]
    counts = (
        ledger["num_rows"],
        ledger["num_empty"],
        ledger["num_cut_away"],
        ledger["num_truncated"],
        ledger["num_desirable"],
    )
    assert counts == (4, 1, 1, 1, 1)
    assert tokenizer.decode(samples[1]["input_ids"][samples[1]["start"] :]) == " 2 1<|im_end|>"
    assert render_answer(samples[1], tokenizer) == "undesirable: Sort: 2 1[[ 2 1<|im_end|>]]"


def test_wrong_labels_and_keys_are_named(tokenizer):
    rows = Dataset.from_list([{"prompt": "a", "completion": " 1", "label": 3}])
    with pytest.raises(UserError, match="row 1: --label_key label"):
        tokenize_unpaired(rows, tokenizer, **OPTIONS, **KEYS)
    with pytest.raises(UserError, match="--completion_key"):
        tokenize_unpaired(rows, tokenizer, **OPTIONS, **{**KEYS, "completion_key": "answer"})


def test_pairs_taken_apart_have_the_tokens_of_the_pairs(tokenizer):
    pairs = Dataset.from_list([{"prompt": [{"role": "user", "content": "2 1"}], "chosen": "1 2", "rejected": "2 1"}])
    (pair,) = tokenize_preference(
        pairs, tokenizer, **OPTIONS, chosen_key="chosen", rejected_key="rejected", margin_key=None
    )[0]
    samples, _ = tokenize_unpaired(pairs, tokenizer, **OPTIONS, **KEYS)
    assert [sample["input_ids"] for sample in samples] == [pair["chosen_ids"], pair["rejected_ids"]]
    assert [sample["loss_mask"] for sample in samples] == [pair["chosen_mask"], pair["rejected_mask"]]
    assert list(samples["label"]) == [True, False]


def sample(number: int) -> dict:
    """Prompt [number], answer [10 + number] * (1 + number)."""
    ids = [number] + [10 + number] * (1 + number)
    facts = {"label": number % 2, "row": number, "num_tokens": len(ids), "num_loss_tokens": 1}
    facts["digest"] = f"{number:016x}"
    return {"input_ids": ids, "loss_mask": [0] + [1] * (1 + number), "start": 1, **facts}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dp_size,micro_batch_size", [(1, 4), (1, 1), (2, 1), (2, 2)])
def test_each_prompt_gets_the_answer_before_it_in_the_global_batch_on_any_layout(packed, dp_size, micro_batch_size):
    found = []
    for rank in range(dp_size):
        loader = GlobalBatchLoader(
            Dataset.from_list([sample(number) for number in range(1, 6)]),
            lambda samples: collate_unpaired(samples, 0, packed=packed, max_len=5),
            batch_size=3, micro_batch_size=micro_batch_size, with_previous=True, dp_rank=rank, dp_size=dp_size,
        )  # fmt: skip
        for batch in loader:
            for part in batch.micro_batches:
                others, ids = part["mismatched"], part["mismatched"]["sequence_ids"]
                for number in range(others["num_sequences"]):
                    found.append([i for i in others["input_ids"][ids == number].tolist() if i])
    # global batches are 1 2 3 and 4 5
    expected = [[1, 13, 13, 13, 13], [2, 11, 11], [3, 12, 12, 12], [4, 15, 15, 15, 15], [5, 14, 14, 14, 14]]
    assert sorted(found) == expected


def test_a_split_over_ranks_splits_the_mismatched_answers_too():
    samples = [{**sample(1), "previous": sample(2)}, {**sample(2), "previous": sample(1)}]
    whole = collate_unpaired(samples, 0, packed=True, max_len=9)
    parts = [split_micro_batch(whole, rank, 2) for rank in range(2)]
    for name in ("labels", "input_ids"):
        joined = natural_order(torch.cat([part["mismatched"][name] for part in parts], 1), 2)
        expected = whole["mismatched"][name]
        assert torch.equal(joined[:, : expected.shape[1]], expected)
    assert parts[0]["mismatched"]["input_ids"].shape[1] < whole["mismatched"]["input_ids"].shape[1]
    assert parts[0]["desirable"].tolist() == [1.0, 0.0]

"""A split micro-batch holds every token once, with its label and position, and the documents of the whole row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded
from trainer.datasets.batches.sequence_split import natural_order, split_micro_batch, zigzag_order, zigzag_shard

PAD = 99


def sample(first_id: int, length: int) -> dict:
    return {"input_ids": list(range(first_id, first_id + length)), "loss_mask": [1] * length}


def split_over_all_ranks(batch: dict, sp_size: int) -> list[dict]:
    return [split_micro_batch(batch, rank, sp_size) for rank in range(sp_size)]


def joined(shards: list[dict], name: str) -> torch.Tensor:
    """The whole rows again, padding included."""
    return natural_order(torch.cat([shard[name] for shard in shards], dim=1), len(shards))


def test_the_example_of_the_docstring():
    batch = collate_packed([sample(10, 5), sample(20, 2)], PAD)
    first, second = split_over_all_ranks(batch, 2)
    assert first["input_ids"].tolist() == [[10, 11, 21, 21]]
    assert second["input_ids"].tolist() == [[12, 13, 14, 20]]
    assert first["labels"].tolist() == [[11, 12, IGNORE, IGNORE]]
    assert second["labels"].tolist() == [[13, 14, IGNORE, 21]]
    assert first["position_ids"].tolist() == [[0, 1, 1, 0]]
    assert second["position_ids"].tolist() == [[2, 3, 4, 0]]
    for shard in (first, second):
        assert shard["cu_seqlens"].tolist() == [0, 5, 7, 8] and shard["cu_seqlens"].dtype == torch.int32


def test_padded_rows_keep_their_rows():
    batch = collate_padded([sample(10, 3), sample(20, 2)], PAD)
    first, second = split_over_all_ranks(batch, 2)
    assert [shard["attention_mask"].tolist() for shard in (first, second)] == [[[1, 0], [1, 0]], [[1, 1], [1, 0]]]
    assert first["input_ids"].tolist() == [[10, 12], [20, PAD]]
    assert second["input_ids"].tolist() == [[11, 12], [21, PAD]]
    assert second["labels"].tolist() == [[12, IGNORE], [IGNORE, IGNORE]]


def test_one_rank_gets_the_batch_itself():
    batch = collate_padded([sample(10, 3)], PAD)
    assert split_micro_batch(batch, 0, 1) is batch


def test_a_row_that_fits_gets_no_document_of_padding():
    batch = collate_packed([sample(10, 5), sample(20, 3)], PAD)
    assert split_micro_batch(batch, 0, 4)["cu_seqlens"].tolist() == [0, 5, 8]


def test_the_empty_micro_batch_is_one_token_and_padding_without_labels():
    for shard in split_over_all_ranks(collate_packed([], PAD), 3):
        assert shard["input_ids"].shape == (1, 2) and (shard["labels"] == IGNORE).all()
        assert shard["cu_seqlens"].tolist() == [0, 1, 6]


def test_what_is_per_token_is_cut_and_what_is_not_passes():
    batch = collate_padded([sample(10, 3), sample(20, 2)], PAD)
    batch |= {
        "advantages": torch.ones(2, 3),
        "hidden": torch.ones(2, 3, 5),
        "rewards": torch.ones(2),
        "ids": ["a", "b"],
    }
    shard = split_micro_batch(batch, 0, 2)
    assert shard["advantages"].tolist() == [[1, 0], [1, 0]] and shard["hidden"].shape == (2, 2, 5)
    assert shard["rewards"] is batch["rewards"] and shard["ids"] is batch["ids"]


def test_rows_padded_on_the_left_are_refused():
    batch = collate_padded([sample(10, 3), sample(20, 2)], PAD)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="right"):
        split_micro_batch(batch, 0, 2)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    sp_size=st.integers(2, 8),
    collate=st.sampled_from([collate_packed, collate_padded]),
)
def test_every_token_is_on_one_rank_with_its_label_and_position(lengths, sp_size, collate):
    batch = collate([sample(100 * (row + 1), length) for row, length in enumerate(lengths)], PAD)
    shards = split_over_all_ranks(batch, sp_size)
    num_tokens = batch["input_ids"].shape[1]
    for name in ("input_ids", "labels", "position_ids"):
        whole = joined(shards, name)
        assert whole.shape[1] == num_tokens + -num_tokens % (2 * sp_size)
        assert torch.equal(whole[:, :num_tokens], batch[name])
        assert (whole[:, num_tokens:] < 2 * sp_size).all() or name == "input_ids"
    ids = joined(shards, "input_ids")
    assert (ids[:, num_tokens:] == ids[:, num_tokens - 1 : num_tokens]).all()
    assert (joined(shards, "labels")[:, num_tokens:] == IGNORE).all()
    assert len({shard["input_ids"].shape for shard in shards}) == 1
    if collate is collate_packed:
        ends = shards[0]["cu_seqlens"].tolist()
        assert ends[: len(lengths) + 1] == batch["cu_seqlens"].tolist()
        assert ends[-1] == sp_size * shards[0]["input_ids"].shape[1]
        assert all(torch.equal(shard["cu_seqlens"], shards[0]["cu_seqlens"]) for shard in shards)


@settings(derandomize=True, deadline=None)
@given(sp_size=st.integers(1, 8), chunk=st.integers(1, 4), dim=st.integers(0, 2))
def test_zigzag_and_natural_order_undo_each_other(sp_size, chunk, dim):
    tensor = torch.arange(2 * 3 * 2 * sp_size * chunk).reshape(2 * sp_size * chunk, 2, 3).movedim(0, dim)
    zigzag = zigzag_order(tensor, sp_size, dim)
    assert torch.equal(natural_order(zigzag, sp_size, dim), tensor)
    assert torch.equal(zigzag.chunk(sp_size, dim)[-1], zigzag_shard(tensor, sp_size - 1, sp_size, dim))

"""Ring and Ulysses attention over 2, 3 and 4 ranks. The checks are in ring_checks.py."""

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT, forked
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from trainer.errors import UserError
from trainer.models.attention.choice import validate_split_model
from trainer.models.attention.ring import find_segments
from trainer.models.attention.ulysses import validate_ulysses


@pytest.mark.parametrize(("num_ranks", "num_checks"), [(2, 10), (3, 9), (4, 10)])
def test_split_attention_is_plain_attention(num_ranks, num_checks):
    code, output = forked(num_ranks, str(ROOT / "test/models/attention/ring_checks.py"), timeout=580)
    assert code == 0, output[-6000:]
    assert output.count("ok ") == num_checks, output
    print(output)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    sp_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 15),
    tile=st.integers(1, 9),
)
def test_segments_cover_every_visible_pair_once_and_no_query_is_left_without_keys(lengths, sp_size, window, tile):
    bounds = torch.tensor([0, *lengths, -sum(lengths) % (2 * sp_size)]).cumsum(0).unique().tolist()
    num_tokens = bounds[-1]
    size = num_tokens // (2 * sp_size)
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.int)
    for rank in range(sp_size):
        for source in range(sp_size):
            rows, columns = (torch.arange(num_tokens).split(size) for _ in range(2))
            rows = torch.cat([rows[rank], rows[2 * sp_size - 1 - rank]])
            columns = torch.cat([columns[source], columns[2 * sp_size - 1 - source]])
            segments = find_segments(rank, source, sp_size, 2 * size, bounds, window, tile)
            # what the forward pass writes without merging: first of all, and every query once
            own = [segment for segment in segments if segment.own]
            assert segments[: len(own)] == own and bool(own) == (rank == source)
            covered = sorted(i for segment in own for i in range(segment.queries.start, segment.queries.stop))
            assert covered == list(range(2 * size)) * (rank == source)
            for segment in segments:
                q, k = rows[segment.queries], columns[segment.keys]
                distance = q[:, None] - k[None]
                assert len(q) and len(k) and distance[0, 0] == segment.distance
                visible = torch.ones_like(distance, dtype=torch.bool)
                if segment.causal:
                    visible = distance >= 0
                if segment.windowed:
                    visible = (distance >= 0) & (distance < window)
                    assert visible.any(1).all() and not visible.all() and len(q) <= tile
                seen[q[:, None], k[None]] += visible.int()
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    document = torch.bucketize(torch.arange(num_tokens), torch.tensor(bounds[1:]), right=True)
    expected = (distance >= 0) & (document[:, None] == document) & (distance < (window or num_tokens))
    assert torch.equal(seen, expected.int())


def test_segments_of_a_million_tokens_take_milliseconds():
    """4096 documents over 8 ranks, for one layer and pass of one rank. Walking through all documents took 29 ms."""
    generator = random.Random(0)
    bounds = [0, *sorted(generator.sample(range(1, 1 << 20), 4095)), 1 << 20]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        found = [segment for source in range(8) for segment in find_segments(3, source, 8, 1 << 17, bounds, None)]
        seconds.append(time.perf_counter() - started)
    assert len(found) == 499 and min(seconds) < 0.01, seconds


def test_ulysses_names_the_group_sizes_that_work():
    validate_ulysses(num_heads=12, sp_size=4)
    with pytest.raises(UserError) as refusal:
        validate_ulysses(num_heads=12, sp_size=5)
    assert str(refusal.value) == (
        "--sp_mode: ulysses over 5 ranks, which do not divide 12 heads "
        "(allowed: ring; ulysses with --ring_attn_size 1, 2, 3, 4, 6, 12)"
    )


def test_models_that_a_shard_cannot_compute_are_refused():
    for config in (
        LlamaConfig(),
        MistralConfig(sliding_window=7),
        Gemma2Config(),
        Gemma3TextConfig(),
        GptOssConfig(),
        Qwen3NextConfig(),
    ):
        validate_split_model(config)
    for config, found in (
        (LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"]), "chunked_attention"),
        (RecurrentGemmaConfig(), "recurrent"),
        (BloomConfig(), "its own kind of attention"),
    ):
        with pytest.raises(UserError, match=f"--ring_attn_size: .*{found}"):
            validate_split_model(config)

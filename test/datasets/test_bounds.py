"""Rows that a model cannot take are named before the first step: ids beyond its embedding, more tokens than positions."""

import json
from types import SimpleNamespace

import datasets
import pytest
from transformers import GPT2Config, GPTJConfig, JambaConfig, LlamaConfig, OPTConfig

from trainer.datasets.samples.bounds import Bounds, check_bounds, check_ids, check_sample
from trainer.errors import UserError
from trainer.models.model_bounds import bounds_of
from trainer.rollout.rollouts_file import as_row, read_rollouts
from trainer.rollout.samples import Sample
from trainer.runs.run_training import check_max_len

SIZES = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
CONFIGS = {
    "gpt2": (GPT2Config(n_positions=64, **SIZES), Bounds(90, 64, True)),
    "opt": (OPTConfig(max_position_embeddings=64, ffn_dim=32, word_embed_proj_dim=32, **SIZES), Bounds(90, 64, True)),
    "gptj": (GPTJConfig(n_positions=64, rotary_dim=8, **SIZES), Bounds(90, 64, True)),
    "llama": (LlamaConfig(max_position_embeddings=64, **SIZES), Bounds(90, 64)),
    "yarn": (LlamaConfig(max_position_embeddings=64, rope_parameters=YARN, **SIZES), Bounds(90)),
    "jamba": (
        JambaConfig(max_position_embeddings=64, intermediate_size=32, num_key_value_heads=2, **SIZES),
        Bounds(90),
    ),
}


def tokenizer(largest: int):
    return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": largest})


def samples(*ids: list[int], names=("input_ids",)):
    rows = [dict.fromkeys(names, part) | {"row": number + 10} for number, part in enumerate(ids)]
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bounds_of_a_model(tmp_path, name):
    config, expected = CONFIGS[name]
    config.save_pretrained(tmp_path)
    assert bounds_of(str(tmp_path), False) == expected


@pytest.mark.parametrize("names", [("input_ids",), ("prompt_ids",), ("chosen_ids", "rejected_ids")])
def test_rows_that_do_not_fit_are_named(names):
    fits, long, beyond = [1, 2], [1] * 5, [3, 90]
    learned = Bounds(90, 4, True)
    found = samples(fits, long, beyond, names=names)
    assert check_bounds(found.select([0]), tokenizer(99), "--dataset", learned) == []
    with pytest.raises(UserError, match="--dataset row 12: 5 tokens, more than the model's 4 positions"):
        check_bounds(found.select([0, 1]), tokenizer(99), "--dataset", learned)
    with pytest.raises(UserError, match="row 13: token 90 is beyond the 90 rows"):
        check_bounds(found, tokenizer(90), "--dataset", Bounds(90))
    with pytest.raises(UserError, match="--teacher_answers row 13: token 90"):
        check_ids(found, "--teacher_answers", 90)
    [warning] = check_bounds(found.select([2, 1, 0]), tokenizer(89), "--eval_dataset", Bounds(90, 4))
    assert warning.startswith("WARNING: --eval_dataset row 12 has 5 tokens, more than the model's 4 positions")


def test_a_row_of_a_stream_is_checked_as_it_is_read():
    check_sample({"input_ids": [1, 89], "row": 6}, "--dataset", Bounds(90, 2, True))
    check_sample({"input_ids": [], "row": 6}, "--dataset", Bounds(90, 2, True))
    for ids, said in (([1, 90], "token 90"), ([1, 2, 3], "3 tokens")):
        with pytest.raises(UserError, match=f"--dataset row 7: {said}"):
            check_sample({"input_ids": ids, "row": 6}, "--dataset", Bounds(90, 2, True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_ids": [1, 90]}, "token 90 is beyond the 90 rows"),
        ({"response_ids": [95, 3]}, "token 95 is beyond"),
        ({"response_ids": [-1, 3]}, "token -1 is beyond"),
        ({"kept_ids": [[2, 91], [3]]}, "token 91 is beyond"),
        ({"prompt_ids": [1, 2, 3]}, "5 tokens, more than the model's 4 positions"),
        ({"prompt_ids": [1.0]}, "a token that is no whole number"),
    ],
)
def test_a_line_of_frozen_rollouts_is_checked(tmp_path, changes, said):
    facts = {"number": 0, "row": 0, "prompt_ids": [1], "response_ids": [2, 3], "log_probs": [-1.0, -1.0]}
    sample = Sample(**facts, finished=True, label=None, score=1.0, metrics={}, kept_ids=[])
    row, path, bounds = as_row(sample, 0, None), tmp_path / "rollouts.jsonl", Bounds(90, 4, True)
    path.write_text(json.dumps(row) + "\n")
    assert len(read_rollouts(str(path), bounds)) == 1
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "number": 1} | changes) + "\n")
    with pytest.raises(UserError) as error:
        read_rollouts(str(path), bounds)
    assert str(path) in str(error.value) and said in str(error.value)
    assert "row 2" in str(error.value) or "line 2" in str(error.value)


def test_a_length_that_the_flag_gives_is_compared_before_rows_are_tokenized():
    """The default is no one's choice: rows decide there, and with rotary positions."""
    for max_len, bounds in (
        (64, Bounds(90, 64, True)),
        (2048, Bounds(90, 64, True)),
        (65, Bounds(90, 64)),
        (65, Bounds(90)),
    ):
        check_max_len(max_len, bounds)
    with pytest.raises(
        UserError, match=r"^--max_len: 65 tokens, more than the model's 64 positions \(allowed: up to 64"
    ):
        check_max_len(65, Bounds(90, 64, True))

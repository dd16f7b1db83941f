"""The reward head: its source, the precision of its scores, and the picture of its scores."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.datasets.samples.answers import collate_sequences
from trainer.errors import UserError
from trainer.models.attention.choice import resolve_attention
from trainer.models.losses.sequence_sums import sum_by_sequence
from trainer.models.reward import make_initial_reward_model, return_token_scores, token_scores
from trainer.rollout.micro_batches import collate_samples
from trainer.rollout.rewards.model_scorer import ModelScorer
from trainer.runs.reward_model_runs import plot_scores


def save_with_head(folder, name: str, head: torch.Tensor) -> str:
    make_model("qwen3").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: head}, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_a_head_that_the_checkpoint_has_is_kept(tmp_path, prefix):
    head = torch.randn(1, 32)
    source = save_with_head(tmp_path / "source", f"{prefix}.weight", head)
    make_initial_reward_model(source, str(tmp_path / "initial"), seed=1, head_prefix=prefix)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "initial", dtype=torch.float32)
    assert torch.equal(model.score.weight, head)
    assert json.loads((tmp_path / "initial/config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]


def test_a_new_head_depends_on_the_seed_alone(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "source")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_initial_reward_model(str(tmp_path / "source"), str(tmp_path / name), seed)
    a, b, c = (load_file(tmp_path / name / "score.safetensors")["score.weight"] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.std().item() == pytest.approx(33**-0.5, rel=0.3)


def test_a_head_that_is_not_there_or_of_another_shape_is_refused(tmp_path):
    source = save_with_head(tmp_path / "source", "value_head.weight", torch.randn(2, 32))
    with pytest.raises(UserError, match=r"--value_head_prefix: no v_head.weight.*value_head"):
        make_initial_reward_model(source, str(tmp_path / "initial"), 1, head_prefix="v_head")
    with pytest.raises(UserError, match=r"value_head.weight of shape \[2, 32\]"):
        make_initial_reward_model(source, str(tmp_path / "initial"), 1, head_prefix="value_head")


def test_an_fp32_head_scores_without_rounding(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "source")
    make_initial_reward_model(str(tmp_path / "source"), str(tmp_path / "initial"), 1)
    scores = {}
    for fp32 in (False, True):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "initial", dtype=torch.bfloat16)
        return_token_scores(model, fp32)
        hidden = model.model(torch.arange(1, 9)[None]).last_hidden_state
        scores[fp32] = model(input_ids=torch.arange(1, 9)[None])
        exact = (hidden.double() @ model.score.weight.double().T).detach()
    assert (scores[False].dtype, scores[True].dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(scores[True].double(), exact, rtol=1e-5, atol=1e-6)
    assert (scores[False].double() - exact).abs().max() > 1e-4


def test_scores_are_drawn_even_where_they_are_all_alike(tmp_path):
    for name, scores in {"spread": torch.randn(50).double(), "alike": torch.zeros(3).double()}.items():
        plot_scores(scores, scores, str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pad_token_id", [0, 2])
def test_sequences_are_scored_where_transformers_scores_them(tmp_path, pad_token_id, packed):
    """The pad token may also be eos, 2, which ends the sequences. transformers then scores the token before it."""
    source = save_with_head(tmp_path / "source", "score.weight", torch.randn(1, 32))
    make_initial_reward_model(source, str(tmp_path / "initial"), seed=1)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "initial", dtype=torch.float32)
    classifier.config.pad_token_id = pad_token_id
    sequences = [[5, 6, 7, 8, 2], [9, 10, 2]]
    expected = [classifier(input_ids=torch.tensor([ids])).logits[0, 0] for ids in sequences]
    samples = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in sequences]
    of_a_rollout = {"response_length": 2, "offset": 0, "loss_weight": 1.0, "number": 0}
    rows = [{**s, **of_a_rollout, "loss_mask": [0] * (len(s["input_ids"]) - 2) + [1, 1]} for s in samples]
    batches = [
        collate_sequences(samples, pad_token_id, packed),
        collate_samples(rows, pad_token_id, packed),
        collate_samples(rows, 5, packed, scoring_pad=pad_token_id),
    ]
    classifier.set_attn_implementation(resolve_attention("sdpa", packed))
    return_token_scores(classifier)
    for batch in batches:
        scores = token_scores(classifier, batch) * batch["is_last"]
        found = sum_by_sequence(scores, batch["sequence_ids"], 2, None)
        torch.testing.assert_close(found.float(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert batches[1]["loss_weights"].sum() == 4  # eos is a response token as before, and gets the reward


@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|im_end|>", None])
def test_a_saved_classifier_and_its_server_score_where_training_did(tmp_path, pad):
    """The pad token is the tokenizer's, or eos if there is none. The config of the first model does not matter."""
    make_demo(str(tmp_path))
    source, folder = tmp_path / "model", tmp_path / "initial"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(source)
    make_initial_reward_model(str(source), str(folder), seed=1)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    padding = tokenizer.convert_tokens_to_ids(pad or "<|im_end|>")
    assert classifier.config.pad_token_id == padding
    sequences = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ("1 2 3 4 5", "6 7")]
    expected = [classifier(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in sequences]
    server = ModelScorer(str(folder), dtype=torch.float32, device="cpu")
    assert server.score(["1 2 3", "6"], [" 4 5", " 7"]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_model_without_a_tokenizer_keeps_its_pad_token(tmp_path):
    """A critic has no tokenizer. For some kinds of model, transformers invents one, with another pad token."""
    model = make_model("qwen2")
    model.config.pad_token_id = 5
    model.save_pretrained(tmp_path / "source")
    make_initial_reward_model(str(tmp_path / "source"), str(tmp_path / "initial"), seed=1)
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "initial").config
    assert config.pad_token_id == 5

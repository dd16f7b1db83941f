"""--speculative_tokens of vLLM: drafts change which tokens are computed together, and no distribution.

The tests run if vLLM is installed. test/run_vllm_tests.sh makes an environment for it.
"""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see test/run_vllm_tests.sh", allow_module_level=True)

from rollout.test_truncation import plainly_kept
from rollout.test_vllm_engine import CPU, assert_same, demo, process_group, shaken, stored  # noqa: F401 fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm import VLLMEngine
from trainer.rollout.engines.on_vllm.vllm_cpu import for_each_draft
from trainer.rollout.engines.sampling import Sampling, sample_seed

PROMPTS = [[5, 6, 7] * 6, [9, 8, 7, 6, 5, 4] * 3, [11] * 10, [30, 31, 32, 33] * 5]  # drafts need texts that repeat
SEEDS = [sample_seed(0, 0, number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def engines(demo):  # noqa: F811
    """(vLLM with drafts, embedded, model)."""
    folder, tokenizer = demo / "model", AutoTokenizer.from_pretrained(demo / "model")
    model = shaken(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), seed=1)
    options = {"dtype": torch.float32, "device": CPU, "batch_size": 8}
    drafting = VLLMEngine(str(folder), **options, max_len=256, speculative_tokens=4)
    embedded = HFEngine(str(folder), tokenizer, **options)
    assert drafting.update_weights(stored(model).items()) == embedded.update_weights(stored(model).items())
    return drafting, embedded, model


def log_probs_of(model, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """The model's own log-probs (tokens, vocabulary)."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def accepted(engine) -> int:
    return engine.draft_counts()["accepted"]


def test_greedy_tokens_are_those_of_the_embedded_engine(engines):
    engine, embedded, _ = engines
    before = accepted(engine)
    found = engine.generate(PROMPTS, Sampling(0.0, 32, (1,)))
    assert accepted(engine) > before, "no draft was taken, so this compares nothing"
    assert_same(found, embedded.generate(PROMPTS, Sampling(0.0, 32, (1,))))
    stop = found[0].token_ids[9]
    assert_same(
        engine.generate(PROMPTS, Sampling(0.0, 32, (stop,))), embedded.generate(PROMPTS, Sampling(0.0, 32, (stop,)))
    )


def test_log_probs_are_those_of_the_model_and_seeds_decide(engines):
    engine, _, model = engines
    sampling, before = Sampling(0.3, 32, ()), accepted(engine)
    found = engine.generate(PROMPTS, sampling, SEEDS)
    assert accepted(engine) > before
    for prompt, completion in zip(PROMPTS, found):
        rows = log_probs_of(model, prompt, completion.token_ids, 0.3)
        expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
    assert engine.generate(PROMPTS, sampling, SEEDS) == found
    tokens = [completion.token_ids for completion in found]
    assert [c.token_ids for c in engine.generate(PROMPTS[::-1], sampling, SEEDS[::-1])][::-1] == tokens
    assert engine.generate(PROMPTS[2:3], sampling, SEEDS[2:3])[0].token_ids == tokens[2]


@pytest.mark.parametrize("cut", [(1.0, 5, 0.0), (0.8, 40, 0.0)])
def test_the_tokens_that_are_drawn_from(engines, cut):
    engine, _, model = engines
    before = accepted(engine)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, Sampling(0.7, 24, (), (), *cut), SEEDS)):
        rows = log_probs_of(model, prompt, found.token_ids, 0.7).double().exp()
        for row, token, log_prob, ids in zip(rows, found.token_ids, found.log_probs, found.kept_ids, strict=True):
            expected = plainly_kept(row.tolist(), *cut)
            assert set(ids) == expected.keys()
            assert math.exp(log_prob) == pytest.approx(expected[token], rel=1e-3)
    assert accepted(engine) > before


def test_sampled_tokens_have_the_frequencies_of_the_model(engines):
    """Of each place, given the tokens before it. With two likely tokens at a time, texts soon repeat."""
    engine, _, model = engines
    count, prompt, before = 300, [11, 12, 13, 11, 12], accepted(engine)
    seeds = [sample_seed(0, 1, number) for number in range(count)]
    found = engine.generate([prompt] * count, Sampling(0.7, 10, (), (), 1.0, 2, 0.0), seeds)
    assert accepted(engine) > before + 100
    firsts, expected = [], []  # whether the likelier token was drawn, and its probability
    for completion in found:
        rows = log_probs_of(model, prompt, completion.token_ids, 0.7).topk(2)
        firsts.append(rows.indices[:, 0] == torch.tensor(completion.token_ids))
        expected.append(rows.values.softmax(-1)[:, 0])
    firsts, expected = torch.stack(firsts).float(), torch.stack(expected)
    limits = 4.5 * (expected * (1 - expected)).sum(0).sqrt()
    assert ((firsts - expected).sum(0).abs() < limits).all()


def test_a_draft_is_rejected_with_the_right_probability(engines):
    """Many requests with the same draft of two tokens. What is drawn instead comes from the rest of the distribution."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    count, probs = 20000, torch.tensor([0.4, 0.3, 0.2, 0.1])
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(count), generators={})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = rejection_sample(
            torch.tensor([2, 0], dtype=torch.int32).repeat(count),
            [2] * count,
            2,
            torch.arange(2, 2 * count + 1, 2, dtype=torch.int32),
            None,
            probs.log().repeat(2 * count, 1),
            torch.full((count, 1), 3, dtype=torch.int32),
            metadata,
        )
    for rows in (drawn[:, 0], drawn[drawn[:, 0] == 2][:, 1]):
        frequency = torch.bincount(rows.long(), minlength=4) / len(rows)
        assert ((frequency - probs).abs() < 4.5 * (probs * (1 - probs) / len(rows)).sqrt()).all()


def test_settings_of_requests_reach_their_drafts():
    settings, ends = torch.tensor([0.5, 0.0, 0.7]), torch.tensor([2, 2, 5], dtype=torch.int32)
    torch.testing.assert_close(for_each_draft(settings, ends, 5, 0, 1), torch.tensor([0.5, 0.5, 0.7, 0.7, 0.7]))
    settings = torch.tensor([40, 0, 3], dtype=torch.int32)
    assert torch.equal(for_each_draft(settings, ends, 5, 0, 1), torch.tensor([40, 40, 3, 3, 3], dtype=torch.int32))

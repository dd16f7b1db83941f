"""top_p, top_k and min_p: the kept tokens and their probabilities against plain Python, and the same set in training."""

import math
import random

import pytest
import torch
from rollout.test_hf_engine import PROMPTS, SEEDS, make_engine, tokenizer  # noqa: F401 (a fixture)

from trainer.models.losses.token_losses import token_entropies, token_log_probs
from trainer.models.losses.truncation import truncate, within_sets
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.micro_batches import SampleSet, collate_samples, spread_sets
from trainer.rollout.rollouts_file import as_row
from trainer.rollout.samples import Sample

CUTS = [
    (0.9, 0, 0.0),
    (1.0, 5, 0.0),
    (1.0, 0, 0.1),
    (0.8, 12, 0.02),
    (0.5, 3, 0.3),
    (1e-6, 0, 0.0),
    (1.0, 1, 0.0),
    (1.0, 0, 1.0),
]


def plainly_kept(probabilities: list[float], top_p: float, top_k: int, min_p: float) -> dict[int, float]:
    """The kept tokens and their probabilities, by going through the tokens from the most to the least likely one."""
    ordered = sorted(enumerate(probabilities), key=lambda pair: -pair[1])
    ordered = [(token, p) for token, p in ordered if p >= min_p * ordered[0][1]]
    if top_k:
        ordered = ordered[:top_k]
    total, taken, kept = sum(p for _, p in ordered), 0.0, {}
    for token, p in ordered:
        if taken < top_p * total:
            kept[token] = p
        taken += p
    return {token: p / sum(kept.values()) for token, p in kept.items()}


@pytest.mark.parametrize("cut", CUTS)
def test_the_kept_tokens_are_those_of_the_definitions(cut):
    logits = 2 * torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    found = truncate(logits.log_softmax(-1), *cut)
    for row, log_probs in zip(logits, found.tolist()):
        expected = plainly_kept(row.double().softmax(-1).tolist(), *cut)
        assert {token for token, value in enumerate(log_probs) if value > -math.inf} == expected.keys()
        for token, p in expected.items():
            assert math.exp(log_probs[token]) == pytest.approx(p, rel=1e-5)


def test_tokens_as_likely_as_the_last_one_are_kept_too():
    found = truncate(torch.tensor([[1.0, 0.0, 0.0, -5.0, 0.0]]).log_softmax(-1), 1.0, 2, 0.0)
    assert (found > -math.inf).tolist() == [[True, True, True, False, True]]


@pytest.mark.parametrize("cut", [(0.8, 0, 0.0), (0.95, 12, 0.05)])
def test_the_engine_draws_from_the_kept_tokens_and_tells_them(cut, tokenizer, tmp_path):  # noqa: F811
    model, engine = make_engine("llama", tokenizer, tmp_path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)  # probabilities that differ
    engine.update_weights((n, v) for n, v in model.state_dict().items() if n not in model.all_tied_weights_keys)
    sizes = set()
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, Sampling(0.8, 12, (1,), (), *cut), SEEDS)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *found.token_ids]])).logits[0, len(prompt) - 1 : -1]
        assert len(found.kept_ids) == len(found.token_ids) == len(logits)
        for row, token, log_prob, ids in zip(logits, found.token_ids, found.log_probs, found.kept_ids):
            expected = plainly_kept((row / 0.8).double().softmax(-1).tolist(), *cut)
            assert set(ids) == expected.keys()
            sizes.add(len(ids))
            assert math.exp(log_prob) == pytest.approx(expected[token], rel=1e-4)
    assert len(sizes) > 3 and max(sizes) < 97
    greedy = engine.generate(PROMPTS, Sampling(0.0, 3, (), (), *cut))
    assert all(found.kept_ids == [] for found in greedy)


def test_nothing_is_kept_where_nothing_is_cut(tokenizer, tmp_path):  # noqa: F811
    _, engine = make_engine("llama", tokenizer, tmp_path)
    [found] = engine.generate(PROMPTS[:1], Sampling(1.0, 3, ()), SEEDS[:1])
    sample = Sample(0, 0, PROMPTS[0], found.token_ids, found.log_probs, False, None)
    assert found.kept_ids == [] and "kept_ids" not in as_row(sample, 0, tokenizer)


@pytest.mark.parametrize("packed", [False, True])
def test_training_normalises_over_the_kept_tokens_of_each_place(packed):
    """Log-probs, entropies and gradients of rows of different lengths, against a softmax over the kept logits only."""
    from types import SimpleNamespace

    generator, vocab = random.Random(0), 23
    samples = []
    for number in range(3):
        response = [generator.randrange(vocab) for _ in range(number + 2)]
        sets = [sorted({token, *generator.sample(range(vocab), 4)}) for token in response]
        samples.append(Sample(number, number, [1, 2], response, [0.0] * len(response), True, None, 0.0, {}, sets))
    rows = SampleSet(samples, "token", 8)
    micro_batches = [collate_samples([rows[0], rows[1]], 0, packed), collate_samples([rows[2]], 0, packed)]
    micro_batches.append(collate_samples([], 0, packed))
    spread_sets([SimpleNamespace(micro_batches=micro_batches)], samples)
    own = [sample for sample in samples for _ in sample.response_ids]
    places = [t for sample in samples for t in range(len(sample.response_ids))]
    seen = 0
    for micro_batch in micro_batches:
        labels = micro_batch["labels"]
        logits = torch.randn(*labels.shape, vocab, requires_grad=True)
        within = within_sets(logits, micro_batch["kept_sets"])
        log_probs = token_log_probs(within, labels, temperature=0.7)
        entropies = token_entropies(within, labels, temperature=0.7)
        expected = torch.zeros(2)
        for row, t in (labels != -100).nonzero().tolist():
            index = micro_batch["response_index"][row, t]
            sample, place = own[index], places[index]
            ids = sample.kept_ids[place]
            plain = (logits[row, t, ids] / 0.7).log_softmax(-1)
            picked = plain[ids.index(sample.response_ids[place])]
            assert log_probs[row, t].item() == pytest.approx(picked.item(), abs=1e-5)
            assert entropies[row, t].item() == pytest.approx(-(plain.exp() * plain).sum().item(), abs=1e-5)
            expected, seen = expected + torch.stack([picked, -(plain.exp() * plain).sum()]), seen + 1
        found = torch.autograd.grad(log_probs.sum() + entropies.sum(), logits, retain_graph=True)[0]
        wanted = torch.autograd.grad(expected.sum(), logits)[0] if expected.requires_grad else torch.zeros_like(logits)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert seen == len(places)

"""Compare the embedded engine with transformers' own generation, and with plain forward passes without a cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model
from transformers import AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.rollout.engines.checksum import CHUNK, PRIME, Checksum, bits_sum
from trainer.rollout.engines.decoding import FEW_KEYS, decoding_attention
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.responses import Responses, ends_in_text
from trainer.rollout.engines.sampling import Completion, Sampling, pick_tokens, sample_seed, uniform_numbers

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [30, 31, 32, 33]]
SEEDS = [sample_seed(0, 0, number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "demo"
    make_demo(str(folder))
    return AutoTokenizer.from_pretrained(folder / "model")


def make_engine(architecture: str, tokenizer, tmp_path, batch_size: int = 8, compiled: bool = False) -> tuple:
    model = make_model(architecture).eval()
    model.save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "batch_size": batch_size}
    engine = HFEngine(str(tmp_path), tokenizer, **options, compiled=compiled)
    stored = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    engine.update_weights(stored.items())
    return model, engine


def plain_log_probs(model, prompt, response, temperature: float) -> torch.Tensor:
    """Log-probs of the response's tokens, by one forward pass over only this sequence, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "llama_bias", "gemma3"])
def test_greedy_tokens_are_those_of_transformers(architecture, tokenizer, tmp_path):
    model, engine = make_engine(architecture, tokenizer, tmp_path)
    found = engine.generate(PROMPTS, Sampling(0.0, 12, (1,)))
    for prompt, completion in zip(PROMPTS, found):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected = expected[0, len(prompt) :].tolist()
        assert completion.token_ids == expected
        assert completion.finished == (expected[-1] == 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_log_probs_are_those_of_a_plain_forward_pass(architecture, tokenizer, tmp_path):
    model, engine = make_engine(architecture, tokenizer, tmp_path)
    prompts = [PROMPTS[0], *PROMPTS, PROMPTS[-1]]  # equal prompts are read once
    completions = engine.generate(prompts, Sampling(0.8, 16, (1, 2, 3)), [11, *SEEDS, 12])
    assert len({tuple(completion.token_ids) for completion in completions}) == len(prompts)
    for completion, prompt in zip(completions, prompts):
        expected = plain_log_probs(model, prompt, completion.token_ids, 0.8)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-5)
        assert completion.finished == (completion.token_ids[-1] in (1, 2, 3))
        assert not set(completion.token_ids[:-1]) & {1, 2, 3}


def test_compiled_decoding_gives_the_same_tokens(tokenizer, tmp_path):
    model, engine = make_engine("qwen3", tokenizer, tmp_path, compiled=True)
    _, plain = make_engine("qwen3", tokenizer, tmp_path)
    prompts, sampling = [*PROMPTS, PROMPTS[0]], Sampling(0.8, 16, (1, 2, 3))
    for some in (prompts, prompts[1:4]):  # also another number of rows, with other weights
        found, expected = (each.generate(some, sampling, [*SEEDS, 12][: len(some)]) for each in (engine, plain))
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        for completion, prompt in zip(found, some):
            log_probs = plain_log_probs(model, prompt, completion.token_ids, 0.8)
            torch.testing.assert_close(torch.tensor(completion.log_probs), log_probs, rtol=0, atol=1e-5)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
        stored = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
        for each in (engine, plain):
            each.update_weights(stored.items())


@pytest.mark.parametrize("num_keys", [1, 40, FEW_KEYS, FEW_KEYS + 1])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_of_one_token_is_its_formula(num_heads, num_kv_heads, num_keys, scaling):
    generator = torch.Generator().manual_seed(num_keys)
    query = torch.randn(3, num_heads, 1, 16, generator=generator)
    room = torch.randn(
        2, 3, num_kv_heads, num_keys + 5, 16, generator=generator
    )  # the keys are part of a longer buffer
    key, value = room[..., :num_keys, :]
    mask = torch.ones(3, 1, 1, num_keys, dtype=torch.bool)
    mask[1, ..., : num_keys // 2] = False  # padding on the left
    for given_mask in (None, mask):
        found, _ = decoding_attention(torch.nn.Module(), query, key, value, given_mask, scaling=scaling)
        wide = [states.double().repeat_interleave(num_heads // num_kv_heads, 1) for states in (key, value)]
        scores = query.double() @ wide[0].mT * (0.25 if scaling is None else scaling)
        if given_mask is not None:
            scores = scores.masked_fill(~given_mask, -torch.inf)
        expected = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(tokenizer, tmp_path):
    _, engine = make_engine("llama", tokenizer, tmp_path, batch_size=4)
    _, alone = make_engine("llama", tokenizer, tmp_path, batch_size=1)
    sampling = Sampling(1.0, 16, (1,))
    together = [c.token_ids for c in engine.generate(PROMPTS, sampling, SEEDS)]
    assert [c.token_ids for c in alone.generate(PROMPTS, sampling, SEEDS)] == together
    assert [c.token_ids for c in engine.generate(PROMPTS[::-1], sampling, SEEDS[::-1])][::-1] == together
    assert [c.token_ids for c in engine.generate(PROMPTS, sampling, [s + 1 for s in SEEDS])] != together


def test_sampled_tokens_have_the_frequencies_of_the_model(tokenizer, tmp_path):
    model, engine = make_engine("llama", tokenizer, tmp_path, batch_size=2000)
    seeds = [sample_seed(0, 1, number) for number in range(2000)]
    first = [c.token_ids[0] for c in engine.generate([PROMPTS[0]] * 2000, Sampling(1.0, 1, ()), seeds)]
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor(first), minlength=97) / 2000
    assert (found - expected).abs().max() < 4 * (expected * (1 - expected) / 2000).sqrt().max()


def test_a_stop_text_ends_a_response(tokenizer, tmp_path):
    _, engine = make_engine("llama", tokenizer, tmp_path)
    free = engine.generate(PROMPTS, Sampling(1.0, 16, ()), SEEDS)[0]
    assert len(free.token_ids) == 16 and not free.finished
    stop = tokenizer.decode(free.token_ids[4:6])
    held = engine.generate(PROMPTS, Sampling(1.0, 16, (), (stop,)), SEEDS)[0]
    assert held.finished and held.token_ids == free.token_ids[: len(held.token_ids)] and len(held.token_ids) <= 6
    assert stop in tokenizer.decode(held.token_ids)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda p: sum(p) > 0.1), st.floats(0, 0.999999))
def test_inverse_transform(weights, uniform):
    probabilities = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    token = pick_tokens(probabilities.log()[None], torch.tensor([uniform], dtype=torch.float64)).item()
    below, upto = probabilities[:token].sum().item(), probabilities[: token + 1].sum().item()
    assert probabilities[token] > 0
    assert below - 1e-9 <= uniform <= upto + 1e-9


def test_uniform_numbers_come_from_their_seed_alone():
    rows = uniform_numbers([3, 4], 5)
    assert torch.equal(rows[1], uniform_numbers([4], 5)[0]) and not torch.equal(rows[0], rows[1])
    assert len({sample_seed(0, r, s) for r in range(20) for s in range(20)}) == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_checksum_sees_every_bit_and_every_place(dtype):
    tensor = torch.arange(1, 25).view(4, 6).to(dtype)
    before = bits_sum(tensor)
    assert bits_sum(tensor.clone()) == before != bits_sum(tensor.T)
    changed = tensor.clone()
    changed[2, 3] += 1
    assert bits_sum(changed) != before
    first, second = Checksum(), Checksum()
    first.add("a", tensor), first.add("b", changed)
    second.add("b", changed), second.add("a", tensor)
    assert first.hexdigest() == second.hexdigest()


@pytest.mark.parametrize("size", [0, 1, PRIME, CHUNK + 1, 2 * CHUNK + 3 * PRIME + 5])
def test_the_checksum_of_long_tensors_is_its_formula(size):
    bits = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(3))
    expected = (bits * (torch.arange(size) % PRIME + 1)).sum().item()
    assert bits_sum(bits.to(torch.int32)) == expected


def test_weights_that_do_not_arrive_are_noticed(tokenizer, tmp_path):
    model, engine = make_engine("llama", tokenizer, tmp_path)
    tensors = dict(model.state_dict())
    tensors.popitem()
    with pytest.raises(RuntimeError, match="not the weights that were sent"):
        engine.update_weights(tensors.items())


class Words:
    """A tokenizer that, like SentencePiece's, drops the leading space of what it decodes first."""

    def decode(self, ids) -> str:
        return "".join(f" w{number}" for number in ids).removeprefix(" ")


@pytest.mark.parametrize("stop", [" w5", "w5", " ".join(f"w{n}" for n in range(60))])
def test_a_stop_text_is_found_at_the_first_token_and_over_many(stop):
    tokenizer, ids = Words(), [5] if len(stop) < 9 else list(range(60))
    ends = [ends_in_text(tokenizer, [7], ids[:count], [stop]) for count in range(1, len(ids) + 1)]
    assert ends == [False] * (len(ids) - 1) + [True]
    assert not ends_in_text(tokenizer, [5], [7], [stop])  # the prompt is not the response
    sampling = Sampling(1.0, 99, (), (stop,))
    responses = Responses([[5], [7]], [99, 99], sampling, tokenizer, "cpu")
    for count, token in enumerate(ids, 1):  # the first row never says the text
        going_on = responses.append(torch.tensor([2, token]), torch.zeros(2), None)
        assert going_on == 2 - (count == len(ids))
    assert responses.completions()[1] == Completion(ids, [0.0] * len(ids), True)
    assert not responses.completions()[0].finished

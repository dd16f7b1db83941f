"""--share_prompts: rows of answers to one prompt, and what models of several kinds compute from them."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model

from trainer.datasets.batches.global_batches import balanced_rows
from trainer.datasets.batches.packing import IGNORE, collate_padded, model_inputs
from trainer.datasets.batches.shared_prompts import collate_shared, sizes_to_plan
from trainer.errors import UserError
from trainer.models.attention import kernels, ring
from trainer.models.attention.prompt_tree import find_parts, share_prompts


def sample(prompt: list[int], answer: list[int], without_loss: tuple = ()) -> dict:
    mask = [0] * len(prompt) + [int(place not in without_loss) for place in range(len(answer))]
    return {"input_ids": prompt + answer, "loss_mask": mask, "prompt_length": len(prompt)}


def test_rows_positions_labels_and_places():
    batch = collate_shared([sample([5, 6, 7], [8, 9]), sample([4], [3]), sample([5, 6, 7], [2])], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 7, 2, 4, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1]]
    none = IGNORE
    assert batch["labels"].tolist() == [[none, none, 8, 9, none, 2, none, 3, none]]
    assert batch["places"] == [(0, 0, 2), (0, 7, 0), (0, 3, 2)]  # token 2 of the last sample is the 6th of the row
    assert batch["more_inputs"]["prompt_bounds"].tolist() == [[0, 2, 5, 7], [7, 7, 9]]


def test_no_sample_is_a_row_without_labels():
    batch = collate_shared([], pad_token_id=0)
    assert (batch["labels"] == IGNORE).all()
    model = make_model("qwen3")
    share_prompts(model)
    assert model(**model_inputs(batch)).logits.isfinite().all()


def test_each_visible_pair_is_in_one_part():
    """Against the rule: a token sees earlier tokens of its part, and all of its prompt."""
    groups = [[0, 2, 5, 7], [7, 7, 9], [9, 12, 12]]
    part_of = [(0, 0), (0, 0), (0, 1), (0, 1), (0, 1), (0, 2), (0, 2), (1, 1), (1, 1), (2, 0), (2, 0), (2, 0)]
    seen = torch.zeros(12, 12, dtype=torch.int)
    for part in find_parts(groups, 0, 0, 1, 12):
        block = torch.ones(part.queries.stop - part.queries.start, part.keys.stop - part.keys.start, dtype=torch.int)
        seen[part.queries, part.keys] += block.tril() if part.causal else block
    for query, (group, part) in enumerate(part_of):
        expected = [int(key <= query and other in ((group, part), (group, 0))) for key, other in enumerate(part_of)]
        assert seen[query].tolist() == expected, query


SAMPLES = [
    sample([11, 12, 13, 14], [15, 16, 17]),
    sample([11, 12, 13, 14], [18]),
    sample([21], [22, 23]),
    sample([11, 12, 13, 14], [15, 16, 19, 20], without_loss=(1, 2)),  # a turn of an environment in between
    sample([21], [24, 25, 26]),
    sample([11, 12, 13], [14, 15]),  # another prompt, of which the first one is a part
]


def loss_and_gradients(model, batch: dict) -> tuple[torch.Tensor, dict]:
    """A loss in which every label has a weight of its own, and its gradients. Weights are fp64."""
    labels = batch["labels"]
    log_probs = model(**model_inputs(batch)).logits.log_softmax(-1)
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != IGNORE]
    names, order = labels[labels != IGNORE], batch["weights"][labels != IGNORE]
    assert len(names) == 13
    loss = (picked * order).sum()
    return loss.detach(), dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))


@pytest.mark.parametrize("kind", ["llama_bias", "qwen2", "qwen3", "olmo2"])
def test_loss_and_gradients_are_those_of_rows_of_their_own(kind, monkeypatch):
    model = make_model(kind).double().eval()
    masks = []
    forward = kernels.block_forward
    monkeypatch.setattr(ring, "block_forward", lambda *block: masks.append(block[5]) or forward(*block))
    plain, shared = collate_padded(SAMPLES, 0), collate_shared(SAMPLES, 0)
    places = shared.pop("places")
    assert shared["input_ids"].shape == (1, 3 + 4 + 2 + 5 + 0 + 3 + 4 + 2 + 3)
    for batch in (plain, shared):
        batch["weights"] = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for number, (one, (row, first, skipped)) in enumerate(zip(SAMPLES, places)):
        for place in range(skipped, len(one["input_ids"])):
            weight = 1 + 0.1 * number + 0.37 * place
            plain["weights"][number, place] = shared["weights"][row, first + place] = weight
    expected, gradients = loss_and_gradients(model, plain)
    share_prompts(model)
    found, others = loss_and_gradients(model, shared)
    assert masks and set(masks) == {None}, "a mask needs memory of tokens x tokens, and a slow kernel"
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for name, gradient in gradients.items():
        # norms compute in fp32, so gradients that are sums over tokens differ by its rounding
        assert (others[name] - gradient).abs().max() < 1e-6 * gradient.abs().max(), name


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_layers_that_do_not_see_everything_are_refused(kind):
    with pytest.raises(UserError, match=r"--share_prompts: the layers of .* cannot share a prompt"):
        share_prompts(make_model(kind))


def test_a_plan_keeps_the_samples_of_a_prompt_together():
    lengths = [9, 3, 9, 5, 8, 9, 4, 4]  # of four prompts with two answers each
    samples = [SimpleNamespace(row=n // 2, size=lambda n=n: SimpleNamespace(tokens=lengths[n])) for n in range(8)]
    sizes = sizes_to_plan(samples)
    assert sizes.tolist() == [9, 9, 9, 9, 9, 9, 4, 4]
    falling = (-sizes).argsort(kind="stable").tolist()
    for rank in range(2):
        for places in balanced_rows(falling, rank, 2, 2):
            assert len({samples[place].row for place in places}) == 1, places

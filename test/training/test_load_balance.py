"""The balance of experts over a batch: against transformers' own loss, and against counts by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from scripts.zoo_models import tiny_config
from trainer.datasets.batches.packing import collate_packed, collate_padded
from trainer.methods.load_balance import mark_tokens, with_batch_balance_loss
from trainer.methods.sft import sft_loss

LENGTHS = (3, 9, 5, 7)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=torch.float32)


def make_samples() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = (torch.randint(2, 300, (length,), generator=generator).tolist() for length in LENGTHS)
    return [{"input_ids": row, "loss_mask": [0] + [1] * (len(row) - 1)} for row in ids]


def by_hand(model) -> dict[str, float]:
    """The four numbers of the batch, one sample at a time."""
    logits = [model(input_ids=torch.tensor([s["input_ids"]]), output_router_logits=True) for s in make_samples()]
    layers = [torch.cat(layer) for layer in zip(*(output.router_logits for output in logits))]
    loads = []
    for layer in layers:
        numbers = [0] * 4
        for token in layer.tolist():
            for expert in sorted(range(4), key=lambda e: -token[e])[:2]:
                numbers[expert] += 1
        loads.append(max(numbers) / (sum(numbers) / 4))
    entropies = [torch.distributions.Categorical(logits=layer).entropy().mean().item() for layer in layers]
    balance = load_balancing_loss_func(tuple(layers), 4, 2).item()
    return {"aux_loss": balance, "expert_load": sum(loads) / 2, "router_entropy": sum(entropies) / 2}


@pytest.mark.parametrize("cuts", [((0, 4),), ((0, 1), (1, 3), (3, 4), (4, 4))])
def test_the_balance_is_that_of_the_batch_however_it_is_cut(model, cuts):
    samples, balanced = make_samples(), with_batch_balance_loss(sft_loss, 0.5, 2)
    batches = [mark_tokens(collate_padded, samples[start:end], 0) for start, end in cuts]
    sums = sum(balanced.first_pass(model, batch).double() for batch in batches)
    num_targets = sum(LENGTHS) - len(LENGTHS)
    assert sums[-1] == sum(LENGTHS)
    found = [balanced.loss(model, batch, sums=sums, num_targets=num_targets) for batch in batches]
    total, count = sum(loss for loss, _, _ in found), sum(count for _, count, _ in found)
    assert count == num_targets
    metrics = [metrics for _, _, metrics in found]
    expected = by_hand(model)
    plain = sum(sft_loss(model, batch)[0] for batch in batches)
    assert (total / count).item() == pytest.approx((plain / count + 0.5 * expected["aux_loss"]).item(), rel=1e-6)
    for name in ("aux_loss", "expert_load"):
        assert (sum(m[name] for m in metrics) / count).item() == pytest.approx(expected[name], rel=1e-5), name
    entropy = [sum(part) for part in zip(*(m["router_entropy"].parts() for m in metrics))]
    assert (entropy[0] / entropy[1]).item() == pytest.approx(expected["router_entropy"], rel=1e-5)


def test_padding_and_a_micro_batch_without_samples_are_no_tokens():
    padded = mark_tokens(collate_padded, make_samples()[:2], 0)["is_token"]
    assert padded.tolist() == [[1] * 3 + [0] * 6, [1] * 9]
    for collate in (collate_padded, collate_packed):
        assert mark_tokens(collate, [], 0)["is_token"].tolist() == [[0]]

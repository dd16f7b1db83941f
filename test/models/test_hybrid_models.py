"""Models with a state from token to token: packed and split rows are computed as each sample alone.

The plain side is transformers' own model on one sample at a time: no packing, no padding, no second rank.
"""

import pytest
import torch
from launch import ROOT, forked
from unusual_models import SAMPLES, alone, assert_same_gradients, make_model

from trainer.datasets.batches.packing import collate_packed
from trainer.models.attention.choice import fit_attention, resolve_attention
from trainer.models.layers.activations import recompute_layers
from trainer.models.layers.recurrent_layers import restart_at_documents
from trainer.models.losses.token_losses import causal_lm_logits, token_log_probs

# delta rule, Mamba 2, Mamba 2 beside attention, convolution, decayed linear attention
NAMES = ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "minimax"]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_get_the_logits_and_gradients_they_get_alone(name, recompute):
    logits, gradients = alone(name)
    model = make_model(name, resolve_attention("sdpa", packed=True))
    fit_attention(model, is_split=False)
    if recompute:
        recompute_layers(model.train())
    restart_at_documents(model)
    batch = collate_packed(SAMPLES, 0)
    found = causal_lm_logits(model, batch)
    torch.testing.assert_close(found[0], logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    causal_lm_logits(model, collate_packed(SAMPLES[:2], 0))  # recomputation must not see these documents
    (-token_log_probs(found, batch["labels"]).sum()).backward()
    assert_same_gradients({key: weight.grad for key, weight in model.named_parameters()}, gradients, name)


def test_without_the_restart_a_state_runs_into_the_next_document():
    """The test above can fail: the models of transformers do mix documents."""
    logits, _ = alone("nemotron_h")
    model = make_model("nemotron_h", resolve_attention("sdpa", packed=True))
    fit_attention(model, is_split=False)
    found = causal_lm_logits(model, collate_packed(SAMPLES, 0))[0]
    first = len(SAMPLES[0]["input_ids"])
    torch.testing.assert_close(found[:first], logits[:first], rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    assert (found - logits)[first:].abs().max() > 1e-2 * logits.abs().max()


def test_rows_split_over_two_ranks_get_the_gradients_that_samples_get_alone():
    """Ring and Ulysses, packed and padded rows."""
    code, output = forked(2, str(ROOT / "test/models/attention/unusual_checks.py"), *NAMES, timeout=300)
    assert code == 0, output[-6000:]
    assert output.count("ok ") == len(NAMES), output

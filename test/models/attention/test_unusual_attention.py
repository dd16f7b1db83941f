"""Packed, ring and Ulysses attention of unusual models equals eager attention of each sample alone."""

import pytest
import torch
from launch import ROOT, forked
from unusual_models import MODELS, SAMPLES, alone, assert_same_gradients, make_config, make_model

from trainer.datasets.batches.packing import collate_packed
from trainer.models.attention.choice import fit_attention, resolve_attention, validate_packed_model
from trainer.models.layers.activations import recompute_layers
from trainer.models.losses.token_losses import causal_lm_logits, token_log_probs

SPLIT = ["Gemma2", "Gemma4Text", "GptOss", "Llama4Text", "MiMoV2Flash", "DeepseekV3", "StableLm", "Phimoe"]


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_get_the_logits_and_gradients_they_get_alone(name, tmp_path):
    make_config(name).save_pretrained(tmp_path)
    validate_packed_model(str(tmp_path), False, "varlen")
    logits, gradients = alone(name)
    model = make_model(name, resolve_attention("sdpa", packed=True))
    fit_attention(model, is_split=False)
    if name != "Phimoe":  # it draws its experts at random in training, and nothing is recomputed outside of training
        recompute_layers(model.train())
    batch = collate_packed(SAMPLES, 0)
    found = causal_lm_logits(model, batch)
    torch.testing.assert_close(found[0], logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    causal_lm_logits(model, collate_packed(SAMPLES[:2], 0))  # recomputation must not see these documents
    (-token_log_probs(found, batch["labels"]).sum()).backward()
    assert_same_gradients({key: weight.grad for key, weight in model.named_parameters()}, gradients, name)


def test_split_rows_get_the_gradients_that_samples_get_alone():
    code, output = forked(2, str(ROOT / "test/models/attention/unusual_checks.py"), *SPLIT, timeout=300)
    assert code == 0, output[-6000:]
    assert output.count("ok ") == len(SPLIT), output

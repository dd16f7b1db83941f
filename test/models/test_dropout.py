"""A model's own dropout is off, for every name of the rate. The dropout of an adapter and the config do not change."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from trainer.models.lora import LoraOptions, add_adapter
from trainer.models.model_loading import disable_dropout

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}  # fmt: skip
RATES = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "layerdrop": 0.5}
MODELS = {  # each way to keep a rate: modules, floats, the config read in the forward pass
    "GPT2": {"n_layer": 2, "n_head": 4, "n_embd": 32},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": {},
    "Falcon": {},
    "Phi": {},
    "Persimmon": {},
    "Mixtral": {"num_local_experts": 4, "num_key_value_heads": 2, "router_jitter_noise": 0.1},
    "Phimoe": {
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        "router_jitter_noise": 0.1,
    },  # its router draws experts
}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=97, **{**SMALL, **RATES, **MODELS[name]})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_in_training_gives_its_logits_in_evaluation(name):
    model, ids = make(name), torch.arange(40).view(4, 10)
    rates, expected = model.config.to_dict(), model.eval()(ids).logits
    assert not torch.equal(model.train()(ids).logits, expected)
    disable_dropout(model)
    for _ in range(3):
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    assert model.training and model.config.to_dict() == rates


def test_an_adapter_that_comes_after_keeps_its_dropout():
    model = make("GPTNeoX")
    disable_dropout(model)
    add_adapter(model, LoraOptions(rank=2, alpha=4, dropout=0.3), "base")
    rates = {module.p for name, module in model.named_modules() if "lora_dropout.default" in name}
    assert rates == {0.3}


def test_what_only_looks_like_noise_stays():
    model = make("Phimoe")
    disable_dropout(model)
    noises = {module.router_jitter_noise for module in model.modules() if hasattr(module, "router_jitter_noise")}
    assert noises == {0.1} and {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} <= {0.0}

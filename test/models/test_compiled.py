"""--compile touches the decoder layers and no name of a weight. Runs of test_parity.py show that it changes no loss."""

import copy

import pytest
import torch
from tiny_models import make_model
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from scripts.zoo_models import tiny_config
from trainer.datasets.batches.packing import collate_packed, collate_padded, model_inputs
from trainer.errors import UserError
from trainer.model_parallel.expert_parallel import forward_of_part
from trainer.models.attention.varlen import register_varlen_attention
from trainer.models.layers.activations import recompute_layers
from trainer.models.layers.compiled import compile_layers
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.strategies.options import StrategyOptions


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_decoder_layer_and_nothing_else_is_compiled(architecture):
    model = make_model(architecture)
    names = list(copy.deepcopy(model).state_dict())
    compile_layers(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == [f"model.layers.{number}" for number in range(model.config.num_hidden_layers)]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("collate", [collate_padded, collate_packed])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_lengths_compile_nothing_again(monkeypatch, collate, checkpointing):
    """The second length makes code for every length. The backend only keeps the graphs, which are counted here."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    model, graphs = make_model("qwen3").train(), []
    if collate is collate_packed:
        model.config._attn_implementation = register_varlen_attention()
    if checkpointing:
        recompute_layers(model)
    compile_layers(model)
    for lengths in ((17, 9), (33, 12), (20, 5), (48, 7)):
        samples = [{"input_ids": list(range(3, 3 + length)), "loss_mask": [1] * length} for length in lengths]
        model(**model_inputs(collate(samples, 0))).logits.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] < graphs[1] == graphs[2] == graphs[3], graphs


def test_a_compiled_mixture_computes_the_same_whatever_the_number_of_tokens():
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers, config.layer_types = 1, None
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = copy.deepcopy(plain)
    compile_layers(model)
    for tokens in (24, 37):
        ids = torch.randint(1, config.vocab_size, (2, tokens))
        for each in (plain, model):
            each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_experts_that_are_shared_out_are_left_out_too():
    """`expert_parallel_checks.py FOLDER qwen3_moe,gpt_oss:ep2-compiled,tp2-z2-compiled` trains such models (minutes)."""
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    experts = model.model.layers[0].mlp.experts
    assert not hasattr(forward_of_part(experts, None, None), "_torchdynamo_disable")
    compile_layers(model)
    assert forward_of_part(experts, None, None)._torchdynamo_disable


@pytest.mark.parametrize(
    "strategy, options",
    [(DeepspeedStrategy, {"zero_stage": 3}), (FSDP2Strategy, {"tensor_parallel_size": 2})],
)
def test_it_is_refused_where_it_fails(strategy, options):
    with pytest.raises(UserError, match="--compile"):
        strategy(StrategyOptions(compile=True, **options))


@pytest.mark.parametrize(
    "strategy, options",
    [(DeepspeedStrategy, {"zero_stage": 2}), (DeepspeedStrategy, {}), (FSDP2Strategy, {"adam_offload": True})],
)
def test_reduce_once_is_refused_where_it_would_do_nothing(strategy, options):
    with pytest.raises(UserError, match="--reduce_once"):
        strategy(StrategyOptions(reduce_once=True, **options))

"""--compile touches the decoder layers and no name of a weight. Runs of test_parity.py show that it changes no loss."""

import copy

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from trainer.compare.zoo_models import tiny_config
from trainer.errors import UserError
from trainer.models.compiled import compile_layers
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


def test_experts_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    with pytest.raises(UserError, match="--compile: with the experts of Qwen3MoeForCausalLM"):
        compile_layers(model)


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

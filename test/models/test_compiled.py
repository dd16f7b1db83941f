"""--compile touches the decoder layers and no name of a weight. That it changes no loss is among the runs of test_parity.py."""

import copy

import pytest
from tiny_models import make_model

from trainer.cli.common import validate_shared
from trainer.cli.train_sft import parse
from trainer.errors import UserError
from trainer.models.compiled import compile_layers


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_decoder_layer_and_nothing_else_is_compiled(architecture):
    model = make_model(architecture)
    names = list(copy.deepcopy(model).state_dict())
    compile_layers(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == [f"model.layers.{number}" for number in range(model.config.num_hidden_layers)]
    assert list(model.state_dict()) == names


def test_it_is_refused_where_it_fails(tmp_path):
    line = ["--pretrain", "x", "--dataset", "y", "--output_dir", str(tmp_path), "--compile"]
    validate_shared(parse([*line, "--backend", "deepspeed", "--tensor_parallel_size", "2"])[0], ())
    for flags in (["fsdp2", "--tensor_parallel_size", "2"], ["deepspeed", "--zero_stage", "3"]):
        with pytest.raises(UserError, match="--compile"):
            validate_shared(parse([*line, "--backend", *flags])[0], ())

"""Buffers that no model folder holds: RoPE tables, embedding scales, multipliers."""

import pytest
import torch
from launch import ROOT, forked
from tiny_models import make_model
from transformers import LlamaForCausalLM

from trainer.errors import UserError
from trainer.model_folders.model_folder import restore_computed_buffers


def test_a_sharded_model_has_the_buffers_of_an_ordinary_one(tmp_path):
    """fully_shard renames the model's class. transformers then took it for remote code and left parents' buffers empty."""
    script = str(ROOT / "test/checkpoints/buffer_checks.py")
    code, output = forked(2, script, str(tmp_path), timeout=180)
    assert code == 0 and output.count("ok ") == 4, output[-4000:]


def test_a_buffer_that_nobody_computes_is_named():
    model = make_model("llama")
    model.model.layers[1].register_buffer("forgotten", torch.ones(4), persistent=False)
    with pytest.raises(UserError, match=r"model\.layers\.1\.forgotten"):
        restore_computed_buffers(model, torch.device("cpu"))


def test_buffers_are_computed_on_the_cpu_wherever_they_go():
    """A GPU computes other last bits of powers and cosines. The meta device stands for it: nothing is computed there."""
    with torch.device("meta"):
        model = LlamaForCausalLM(make_model("llama").config)
    restore_computed_buffers(model, torch.device("meta"))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}

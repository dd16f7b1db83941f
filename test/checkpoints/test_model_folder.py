"""Model folders that would be read wrongly: quantized weights, tensors that nobody reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from trainer.errors import UserError
from trainer.model_folders.model_folder import check_weights, open_files


def test_a_quantization_that_is_not_read_is_refused_in_one_line(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"--ref_model: .* holds weights quantized by gptq"):
        open_files(str(tmp_path), "--ref_model")


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma3"])
def test_a_tensor_that_nobody_reads_is_named(architecture, tmp_path):
    model = make_model(architecture)
    model.save_pretrained(tmp_path)
    assert check_weights(model, str(tmp_path), "--pretrain") == []
    weights = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1), "model.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_weights(model, str(tmp_path), "--pretrain") == ["model.layers.0.mlp.up_proj.weight_scale_inv"]

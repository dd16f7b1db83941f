"""FP8 and mxfp4 folders train as the same weights in full precision do, on every layout, and are saved without scales.

The weights in full precision are made here by the formula of the format, or by transformers' own conversion.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from launch import train_many
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.model_folders.model_folder import open_files

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 256, "num_hidden_layers": 2,
}  # fmt: skip
BLOCK = [24, 20]  # divides neither 32 nor 64: the last blocks are smaller, and parts of tp begin within a block
FP8 = {
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    },
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
}
LAYOUTS = {
    "fsdp2": ["--backend", "fsdp2"],
    "z1": ["--backend", "deepspeed", "--zero_stage", "1"],
    "z3": ["--backend", "deepspeed", "--zero_stage", "3"],
    "fsdp2-tp": ["--backend", "fsdp2", "--tensor_parallel_size", "2"],
    "z1-tp": ["--backend", "deepspeed", "--zero_stage", "1", "--tensor_parallel_size", "2"],
}
RUNS = [("block", layout) for layout in LAYOUTS] + [("channel", "fsdp2"), ("tensor", "z3")]
RUNS += [("mxfp4", layout) for layout in ("fsdp2", "z1", "z3", "fsdp2-tp", "z1-tp")]


def quantize(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what the folder holds, by the end of its name; the weight that it stands for)"""
    rows, columns = weight.shape
    step = {"block": BLOCK, "channel": [1, columns], "tensor": [rows, columns]}[kind]
    scale = torch.empty(math.ceil(rows / step[0]), math.ceil(columns / step[1]))
    value, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * step[0], (i + 1) * step[0]), slice(j * step[1], (j + 1) * step[1])
            scale[i, j] = weight[at].abs().max() / 448  # the largest value of E4M3
            value[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[at] = value[at].float() * scale[i, j]
    if kind == "tensor":
        scale = scale.reshape(())
    return {"": value, "_scale_inv" if kind == "block" else "_scale": scale}, meant


def make_fp8(folder: Path, kind: str) -> None:
    """folder/KIND in FP8, and folder/KIND-full, which holds the same weights in fp32."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.float32).save_pretrained(folder / f"{kind}-full")
    shutil.copytree(folder / f"{kind}-full", folder / kind)
    weights, stored = load_file(folder / kind / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        parts, weights[name] = quantize(weights[name], kind)
        stored |= {name + end: part for end, part in parts.items()}
    save_file(weights, folder / f"{kind}-full/model.safetensors", {"format": "pt"})
    save_file(weights | stored, folder / kind / "model.safetensors", {"format": "pt"})
    set_quantization(folder / kind, FP8[kind])


def make_mxfp4(folder: Path) -> None:
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, layer_types=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "mxfp4-full")
    shutil.copytree(folder / "mxfp4-full", folder / "mxfp4")
    weights = load_file(folder / "mxfp4/model.safetensors")
    full = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        full[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32).contiguous()
    save_file(full, folder / "mxfp4-full/model.safetensors", {"format": "pt"})
    save_file(weights, folder / "mxfp4/model.safetensors", {"format": "pt"})
    set_quantization(folder / "mxfp4", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})


def set_quantization(folder: Path, quantization: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    make_demo(str(folder / "demo"))
    for kind in FP8:
        make_fp8(folder, kind)
    make_mxfp4(folder)
    for model in folder.glob("*/config.json"):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (folder / "demo/model" / name).exists():
                shutil.copy(folder / "demo/model" / name, model.parent)
    line = ["--dataset", str(folder / "demo/sft.jsonl"), "--apply_chat_template", "--max_samples", "32"]
    line += ["--train_batch_size", "8", "--micro_train_batch_size", "4", "--max_steps", "2", "--param_dtype", "fp32"]
    lines = []
    for kind, layout in RUNS:
        for model in (kind, f"{kind}-full"):
            flags = ["--pretrain", str(folder / model), "--output_dir", str(folder / f"run-{model}-{layout}")]
            lines.append([*line, *flags, *LAYOUTS[layout]])
    train_many(2, lines, folder, timeout=500)
    return folder


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(("kind", "layout"), RUNS)
def test_a_quantized_folder_trains_as_its_full_weights_do(folder, kind, layout):
    quantized, full = (losses(folder / f"run-{model}-{layout}") for model in (kind, f"{kind}-full"))
    assert len(full) == 2 and quantized == full


@pytest.mark.parametrize(("kind", "layout"), [("block", "fsdp2"), ("block", "z3"), ("mxfp4", "fsdp2"), ("mxfp4", "z3")])
def test_the_saved_model_is_in_full_precision(folder, kind, layout):
    saved, full = (folder / f"run-{model}-{layout}/model" for model in (kind, f"{kind}-full"))
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    weights, expected = load_file(saved / "model.safetensors"), load_file(full / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_every_part_of_a_weight_is_read_as_the_whole(folder):
    for kind, name in (("block", "mlp.up_proj.weight"), ("mxfp4", "mlp.experts.down_proj")):
        weights, name = open_files(str(folder / kind)), f"model.layers.1.{name}"
        whole = weights.read(name)
        assert whole.equal(load_file(folder / f"{kind}-full/model.safetensors")[name])
        ends = [(0, size // 3, size // 2, size) for size in whole.shape]
        for dim in range(whole.ndim):
            for start, stop in zip(ends[dim], ends[dim][1:], strict=False):
                region = tuple(slice(start, stop) if d == dim else slice(0, whole.shape[d]) for d in range(whole.ndim))
                assert weights.read(name, region).equal(whole[region]), (kind, region)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, "holds weights quantized by gptq"),
        ({"quant_method": "awq", "bits": 4}, "holds weights quantized by awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "holds weights quantized by bitsandbytes"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}},
            "holds weights quantized by compressed-tensors",
        ),
    ],
)
def test_other_quantizations_are_refused(folder, quantization, expected, tmp_path):
    shutil.copytree(folder / "block", tmp_path / "model")
    set_quantization(tmp_path / "model", quantization)
    with pytest.raises(UserError, match=expected):
        open_files(str(tmp_path / "model"), "--pretrain")


def test_fp8_without_a_scale_is_refused(folder, tmp_path):
    shutil.copytree(folder / "block", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"mlp.up_proj.weight is F8_E4M3, and its scale is not known"):
        open_files(str(tmp_path / "model"), "--pretrain")

"""`export`: what SOURCE is, what is refused, and models in another dtype, in other files, or out of FP8 and mxfp4.

Exports of checkpoints are in test_resume.py, merged adapters in test_lora.py.
"""

import json
import re

import pytest
import torch
from checkpoints.test_quantized_folders import make_fp8, make_mxfp4
from safetensors.torch import load_file
from tiny_models import make_model

from trainer.cli.export import run
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("held", "flags", "expected"),
    [
        ("", "", "SOURCE: .*x: no such folder"),
        ("notes.txt", "", "SOURCE: .*x is no checkpoint, model or adapter"),
        ("metrics.jsonl", "", r"SOURCE: .*x is a run \(allowed: .*x/checkpoints/step_N or .*x/model\)"),
        ("step_2/a step_10/a", "", "SOURCE: .*x holds several checkpoints .*such as .*x/step_10"),
        ("state.json", "", "SOURCE: .*x: manifest.json is missing"),
        ("adapter_config.json config.json", "", "SOURCE: .*x holds no adapter_model.safetensors"),
        ("config.json", "", "SOURCE: .*x holds no weights"),
        ("config.json pytorch_model.bin", "", "SOURCE: .*x holds .bin files"),
        ("config.json model.safetensors", "--portable", "--portable: has no meaning for a model"),
        ("config.json model.safetensors", "--base m", "--base: has no meaning for a model"),
        ("config.json model.safetensors", "--max_shard_gb 0", "--max_shard_gb: 0 "),
        ("adapter_config.json adapter_model.safetensors", "--base none", "--base: none is not a folder"),
        ("adapter_config.json adapter_model.safetensors", "", "--base: missing, and .*x names no base model"),
        ("config.json model.safetensors", "--dtype fp8", "arguments: .*fp8"),
    ],
)
def test_what_is_refused(held, flags, expected, tmp_path):
    for name in held.split():
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("{}")
    with pytest.raises(UserError) as error:
        run([str(tmp_path / "x"), str(tmp_path / "out"), *flags.split()])
    assert re.match(expected, str(error.value)) and "\n" not in str(error.value), error.value
    assert not list(tmp_path.glob("out*"))


def test_a_folder_that_exists_is_not_replaced(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"OUT: .* exists already"):
        run([str(tmp_path / "model"), str(tmp_path / "model")])


def test_a_model_in_another_dtype_and_in_small_files(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "model/README.md").write_text("A model.")
    run([str(tmp_path / "model"), str(tmp_path / "same")])
    run([str(tmp_path / "model"), str(tmp_path / "bf16"), "--dtype", "bf16", "--max_shard_gb", "1e-5"])
    expected = load_file(tmp_path / "model/model.safetensors")
    same = load_file(tmp_path / "same/model.safetensors")
    assert same.keys() == expected.keys() and all(torch.equal(same[name], expected[name]) for name in same)
    assert (tmp_path / "same/config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    assert (tmp_path / "bf16/README.md").read_text() == "A model."
    files = [load_file(path) for path in (tmp_path / "bf16").glob("*.safetensors")]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert len(files) > 2 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)
    index = json.loads((tmp_path / "bf16/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["block", "mxfp4"])
def test_quantized_weights_become_full_precision(kind, tmp_path):
    make_mxfp4(tmp_path) if kind == "mxfp4" else make_fp8(tmp_path, kind)
    run([str(tmp_path / kind), str(tmp_path / "out"), "--dtype", "fp32"])
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in (f"{kind}-full", "out"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())

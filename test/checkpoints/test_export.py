"""`export`: what SOURCE is, what is refused, and models in another dtype, in other files, or out of FP8, mxfp4 and GGUF.

Exports of checkpoints are in test_resume.py, merged adapters in test_lora.py.
"""

import json
import math
import os
import re
import struct

import pytest
import torch
from checkpoints.test_quantized_folders import make_fp8, make_mxfp4
from gguf_files import as_gguf
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.piece_index import PieceIndex
from trainer.checkpoints.shards import whole_shard, write_shards
from trainer.cli.export import run
from trainer.errors import UserError
from trainer.model_folders.folder_names import check_model_name
from trainer.model_folders.gguf_header import check_gguf
from trainer.runs import exported_models
from trainer.runs.exported_models import config_dtype


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


@pytest.mark.parametrize("name", ["load", "nope", 5, ["float32"]])
def test_a_dtype_of_a_config_is_one_of_torch(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": name}))
    with pytest.raises(UserError, match=r"config\.json: dtype "):
        config_dtype(str(tmp_path))


# --- checkpoints of strangers, whose hashes fit

PROGRESS = {"step": 2, "tokens_seen": 7, "skipped_steps": 0}
FLAGS = {"pretrain": "gone", "dataset": "rows.jsonl", "lora_rank": 0, "learning_rate": 1e-5, "image_max_pixels": None}
STATE = {"format": 1, "arguments": FLAGS, "identity": {"command": "train_sft"}, "progress": PROGRESS}
DEEP = json.loads("[" * 500 + "]" * 500)


@pytest.fixture(scope="module")
def tiny():
    return make_model("qwen3")


def checkpoint(tiny, place, state: object = STATE, config: object = None, **more: str) -> str:
    """A checkpoint with these contents, and the manifest that fits. `config`: values of config.json, or all of it."""
    made = place / "step_2.tmp"
    tiny.config.save_pretrained(made / "hf")
    written = made / "hf/config.json"
    values = json.loads(written.read_text()) | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    written.write_text(json.dumps(values | config if isinstance(config, dict) else config or values))
    shards = [whole_shard(f"weight/{name}", tensor, True) for name, tensor in tiny.state_dict().items()]
    _, pieces = write_shards(shards, str(made), "pieces-00000")
    PieceIndex.of_pieces(pieces).write(str(made))
    (made / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    for name, text in more.items():
        (made / "hf" / name).write_text(text)
    store.commit(str(made), str(place / "step_2"), {})
    return str(place / "step_2")


def test_a_checkpoint_becomes_a_model_with_its_card(tiny, tmp_path):
    run([checkpoint(tiny, tmp_path), str(tmp_path / "out")])
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tiny.state_dict().items() if name in found)
    assert "| tokens seen | 7 |" in (tmp_path / "out/README.md").read_text()


STATES = [
    *["no JSON", "[" * 100_000, "[]", '"text"', "5", {"format": 2}, {"format": 1}],
    *[STATE | {"progress": odd} for odd in (None, [], 3, {"step": "2"}, {"step": -1}, {"other": 1}, {"step": math.nan})],
    *[STATE | {"arguments": odd} for odd in ([], "text", 5, None)],
    *[STATE | {"identity": odd} for odd in ([], "text", 5, {"command": 5}, {"command": None}, {"command": "rm -rf"}, {"command": ["a"]})],
    *[STATE | {"arguments": FLAGS | {"pretrain": odd}} for odd in (5, None, ["a"], {"a": 1}, True)],
    *[STATE | {"arguments": FLAGS | {"dataset": odd}} for odd in (5, ["a"], {"a": 1}, False)],
    *[STATE | {"arguments": FLAGS | {"lora_rank": odd}} for odd in ("8", [], {}, 0.5, True)],
    *[STATE | {"arguments": FLAGS | {"image_max_pixels": odd}} for odd in ("8", [], {}, True)],
    *[STATE | {"arguments": FLAGS | {"learning_rate": odd}} for odd in (DEEP, {"a": 1}, [[1]])],
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: json.dumps(state)[:60])
def test_a_state_with_odd_values_is_one_line(tiny, state, tmp_path):
    refused_as_source(checkpoint(tiny, tmp_path, state), tmp_path)


CONFIGS = [
    *["no JSON", "[" * 100_000, "[]", "5", "null", "{}"],
    *[{"architectures": odd} for odd in (5, None, {}, [], "Qwen3ForCausalLM", [["Qwen3ForCausalLM"]], [5], [None])],
    *[{"architectures": [odd]} for odd in ("logging", "pipeline", "AutoConfig", "Trainer", "PreTrainedModel")],
    {"architectures": ["Qwen3ForCausalLM", "Qwen3ForCausalLM"]},
    {"architectures": ["LlamaForCausalLM"]},
    *[{"model_type": odd} for odd in (5, None, [], "nothing", {"a": 1})],
    *[{"num_hidden_layers": odd} for odd in ("2", -1, 1 << 40, 10**8, None, [2])],
    *[{"hidden_size": odd} for odd in ("2", -1, 1 << 70, None, [2])],
    *[{"dtype": odd} for odd in (5, [], {"a": 1}, "load")],
    *[{"layer_types": odd} for odd in (5, ["nothing"], {"a": 1})],
    {"rope_parameters": [1]},
    {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"},
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: json.dumps(config)[:60])
def test_a_config_with_odd_values_is_one_line(tiny, config, tmp_path):
    refused_as_source(checkpoint(tiny, tmp_path, config=config), tmp_path)


@pytest.mark.parametrize("adapter", ["no JSON", "[]", "5"])
def test_an_adapter_of_a_checkpoint_may_have_an_odd_config(tiny, adapter, tmp_path):
    """Its text is copied as it is. The weights are those of the checkpoint."""
    run([checkpoint(tiny, tmp_path, **{"adapter_config.json": adapter}), str(tmp_path / "out")])
    assert (tmp_path / "out/adapter_config.json").read_text() == adapter


def test_a_link_in_a_checkpoint_takes_no_file_of_this_machine(tiny, tmp_path):
    path = checkpoint(tiny, tmp_path)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", f"{path}/hf/notes.txt")
    run([path, str(tmp_path / "out")])
    assert not (tmp_path / "out/notes.txt").exists()


ODD_ADAPTERS = [{"peft_type": odd} for odd in (5, None, [], "nothing")] + [{"r": odd} for odd in ("x", None, [], -1)]
ODD_ADAPTERS += [{"target_modules": 5}, {"task_type": [1]}, {"r": 1 << 70}, {"lora_alpha": "x"}, {"other": 1}]


@pytest.mark.parametrize("odd", ODD_ADAPTERS, ids=json.dumps)
def test_an_adapter_with_odd_values_is_one_line(tiny, odd, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(exported_models, "load_tokenizer", lambda folder: None)
    tiny.save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    values |= {"base_model_name_or_path": str(tmp_path / "base")} | odd
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(values))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter/adapter_model.safetensors")
    refused_as_source(str(tmp_path / "adapter"), tmp_path)


ODD_MODELS = ["[]", "no JSON", {"text_config": 5}, {"text_config": [1]}, {"quantization_config": [5]}]
ODD_MODELS += [{"quantization_config": odd} for odd in (5, "x", {"quant_method": 5}, {"config_groups": 5})]


@pytest.mark.parametrize("odd", ODD_MODELS, ids=json.dumps)
def test_a_model_with_odd_values_is_one_line(tiny, odd, tmp_path):
    tiny.save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(odd if isinstance(odd, str) else json.dumps(json.loads(path.read_text()) | odd))
    refused_as_source(str(tmp_path / "model"), tmp_path)


def refused_as_source(path: str, folder) -> None:
    with pytest.raises(UserError) as error:
        run([path, str(folder / "out")])
    line = str(error.value)
    assert re.match(r"SOURCE: |.*config.json: ", line) and "\n" not in line and len(line) < 600, line
    assert ".tmp" not in line and not list(folder.glob("out*")), line


# --- GGUF


def test_a_gguf_file_becomes_a_model_folder(tmp_path):
    model, quantized = make_model("llama"), "model.layers.0.mlp.up_proj.weight"
    full = as_gguf(model, tmp_path / "tiny.gguf", quantized)
    run([str(tmp_path / "tiny.gguf"), str(tmp_path / "model")])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = model.state_dict() | {quantized: full}
    assert found.dtype == torch.float32 and not hasattr(found.config, "quantization_config")
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert not torch.equal(full, model.state_dict()[quantized])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer("abA<|im_end|>")["input_ids"] == [66, 32, 67]


def gguf_value(name: str, kind: int, form: str, *values) -> bytes:
    return struct.pack(f"<Q{len(name)}sI{form}", len(name), name.encode(), kind, *values)


GGUF_HEADERS = {  # (number of tensors, number of values, the values)
    "array without an end": (0, 1, gguf_value("a", 9, "IQ", 4, 1 << 60)),
    "texts without an end": (0, 1, gguf_value("a", 9, "IQ", 8, 1 << 60)),
    "text without an end": (0, 1, gguf_value("a", 8, "Q", 1 << 63)),
    "arrays in arrays": (0, 1, gguf_value("a", 9, "IQIQIQIQIQIQ", *[9, 1] * 6)),
    "values without an end": (0, 1 << 60, b""),
    "tensors without an end": (1 << 60, 0, b""),
    "many layers": (0, 1, gguf_value("llama.block_count", 4, "I", 1 << 30)),
    "odd kind": (0, 1, gguf_value("a", 99, "I", 0)),
    "half a header": (0, 5, b"a"),
    "name that is no text": (0, 1, struct.pack("<Q2sII", 2, b"\xff\xfe", 4, 0)),
}


@pytest.mark.parametrize("name", GGUF_HEADERS)
def test_a_gguf_header_that_claims_more_than_its_file_is_one_line(tmp_path, name):
    tensors, count, values = GGUF_HEADERS[name]
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + values)
    with pytest.raises(UserError, match="has a broken header, or is no GGUF file"):
        check_gguf(str(tmp_path / "a.gguf"))


def test_a_gguf_file_of_a_model_that_it_cannot_hold_is_one_line(tmp_path):
    model = make_model("llama")
    as_gguf(model, tmp_path / "a.gguf", "model.layers.0.mlp.up_proj.weight")
    width = gguf_value("llama.feed_forward_length", 4, "I", model.config.intermediate_size)
    data, wide = (tmp_path / "a.gguf").read_bytes(), gguf_value("llama.feed_forward_length", 4, "I", 1 << 30)
    assert data.count(width) == 1
    (tmp_path / "a.gguf").write_bytes(data.replace(width, wide))
    with pytest.raises(UserError, match="which it cannot hold"):
        run([str(tmp_path / "a.gguf"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_no_model_to_train(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        UserError, match=r"--pretrain: .*tiny.gguf is a GGUF file. Convert it: trainer export .*tiny.gguf MODEL"
    ):
        check_model_name(str(tmp_path / "tiny.gguf"), "--pretrain")
    pytest.importorskip("gguf")
    with pytest.raises(UserError, match=r"SOURCE: .*tiny.gguf has a broken header"):
        run([str(tmp_path / "tiny.gguf"), str(tmp_path / "model")])
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]

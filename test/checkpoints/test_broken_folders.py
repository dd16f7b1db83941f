"""A broken model folder, such as an interrupted download, ends a run in one line before its first step."""

import json

import pytest
from launch import ROOT, in_fork

FOUND = {
    "index outside": "names a file outside of its folder: ../index_outside.safetensors",
    "absolute index": "names a file outside of its folder: /",
    "code": "is a strange, which only its own code reads (allowed: --trust_remote_code",
    "pickled code": "has a .bin file with more than tensors in it, which would run code",
    "small vocabulary": "model.embed_tokens.weight",
    "half a file": "model.safetensors is cut off: ",
    "one byte short": "model.safetensors is cut off: ",
    "half a header": "model.safetensors is cut off in its header",
    "empty file": "model.safetensors is empty",
    "git-lfs pointer": "model.safetensors is a pointer of git-lfs",
    "missing shard": "1 of the 2 files of model.safetensors.index.json are missing, such as model-00002-of-00002",
    "half a shard": "model-00002-of-00002.safetensors is cut off: 3000 of ",
    "index names too much": "names model.layers.9.mlp.up_proj.weight, which model-00001-of-00002.safetensors does not hold",
    "missing tensor": "has no weight model.norm.weight",
    "unknown model_type": "does not know the model_type 'llama9'",
    "padding on the left": "is a cpmant, whose mask wants padding on the left",
    "vocabulary of the config": "model.embed_tokens.weight",
    "large tokenizer": "is beyond the 280 rows of the model's embedding",
    "width of the config": "mlp",
    "no number": "Field 'num_hidden_layers' expected int, got str",
    "broken config": "config.json is broken JSON",
    "deep config": "config.json is nested too deep",
    "broken tokenizer": "tokenizer.json: is broken JSON",
    "deep data": "deep.jsonl line 5: lists or objects are nested too deep",
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> dict[str, list[str]]:
    script = str(ROOT / "test/checkpoints/broken_folder_runs.py")
    code, output = in_fork(script, str(tmp_path_factory.mktemp("broken")), timeout=400)
    assert code == 0, output[-4000:]
    return json.loads(output.splitlines()[-1])


def test_every_fault_is_tried(endings):
    assert endings.keys() == FOUND.keys()


@pytest.mark.parametrize("fault", FOUND)
def test_one_line_before_the_first_step(endings, fault):
    kind, text, log = endings[fault]
    assert kind == "refused" and FOUND[fault] in text, text
    assert "Traceback" not in log and "step 1/" not in log
    assert len(log.strip().splitlines()[-1]) < 600

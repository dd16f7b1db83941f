"""Model files that are written tensor by tensor are what the safetensors library reads."""

import json

import pytest
import torch
from safetensors.torch import load_file

from trainer.model_folders.model_writer import save_safetensors_shards
from trainer.model_folders.safetensors_stream import ROOM

TENSORS = {
    "bf16": torch.randn(3, 5).bfloat16(),
    "steps": torch.tensor(3),  # behind 15 bf16 numbers it would not be aligned
    "empty": torch.randn(0, 4),
    "fp8": torch.randn(7).to(torch.float8_e4m3fn),
    "transposed": torch.randn(9, 6).t(),
    "flag": torch.tensor(True),
    "scalar": torch.randn((), dtype=torch.float16),
    'a "name" with ü': torch.randn(2),
}


def read(folder) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("max_bytes", [100, 1 << 30])
def test_every_kind_of_tensor_comes_back(max_bytes, tmp_path):
    save_safetensors_shards(iter(TENSORS.items()), str(tmp_path), max_bytes)
    found = read(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for file in set(index["weight_map"].values()):
        size = sum(tensor.nbytes for tensor in load_file(tmp_path / file).values())
        assert size <= max_bytes or len(load_file(tmp_path / file)) == 1


def test_a_file_whose_header_is_full_is_followed_by_another(tmp_path):
    tensors = {f"layers.{number}.a_long_name_of_a_weight": torch.full((2,), float(number)) for number in range(2000)}
    save_safetensors_shards(iter(tensors.items()), str(tmp_path), 1 << 30)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for file in tmp_path.glob("*.safetensors"):
        assert file.stat().st_size == 8 + ROOM + sum(tensor.nbytes for tensor in load_file(file).values())
    found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()) and len(found) == 2000


def test_one_file_has_the_usual_name(tmp_path):
    save_safetensors_shards(iter({"a": torch.randn(3, 3), "b": torch.randn(2)}.items()), str(tmp_path), 1 << 30)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]

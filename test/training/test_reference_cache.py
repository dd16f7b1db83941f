"""The key of cached reference log-probs: anything that changes them also changes the key."""

import torch
from safetensors.torch import save_file

from trainer.methods.reference_cache import model_hash


def test_the_hash_is_of_the_weights_in_either_format(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    hashes = [model_hash(tmp_path)]
    for value in (1.0, 2.0):
        torch.save({"weight": torch.full((2,), value)}, tmp_path / "pytorch_model.bin")
        hashes.append(model_hash(tmp_path))
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    hashes.append(model_hash(tmp_path))
    assert len(set(hashes)) == 4 and model_hash(tmp_path) == hashes[-1]

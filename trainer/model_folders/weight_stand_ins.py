"""Weights of .bin files. transformers loads them all to host memory; nothing is unpickled but tensors."""

from typing import Optional

import torch

from trainer.errors import UserError


class LoadedWeights:
    """Weights that transformers has loaded and converted, with the same methods as a SafetensorsFolder."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        return self._tensors[name] if region is None else self._tensors[name][region]


def load_bin(kind: type, config, folder: str, names: list[str]) -> LoadedWeights:
    """The weights of .bin files under the names of a model `kind`, in fp32. Raises UserError if one is missing."""
    loaded, info = kind.from_pretrained(
        folder, config=config, dtype=torch.float32, weights_only=True, output_loading_info=True
    )
    missing = [name for name in names if name in info["missing_keys"]]
    if missing:
        raise UserError(folder, f"has no weight {missing[0]}", "a complete model")
    return LoadedWeights(loaded.state_dict())

"""Weights of a model that do not come from safetensors: .bin files, and zeros that a checkpoint replaces.

Both classes have the methods of a SafetensorsFolder that a strategy calls.
"""

import pickle
from typing import Optional

import torch

from trainer.errors import UserError


class LoadedWeights:
    """Weights that transformers has loaded and converted."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        return self._tensors[name] if region is None else self._tensors[name][region]


def load_bin(kind: type, config, folder: str, names: list[str]) -> LoadedWeights:
    """The weights of .bin files under the names of a model `kind`, in fp32. Nothing is unpickled but tensors.

    transformers loads all of them to host memory. Raises UserError if one of `names` is missing.
    """
    try:
        loaded, info = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, weights_only=True, output_loading_info=True
        )
    except pickle.UnpicklingError:
        found = "has a .bin file with more than tensors in it, which would run code"
        raise UserError(folder, found, "safetensors, or .bin files of tensors only") from None
    missing = [name for name in names if name in info["missing_keys"]]
    if missing:
        raise UserError(folder, f"has no weight {missing[0]}", "a complete model")
    return LoadedWeights(loaded.state_dict())


class UnreadWeights:
    """Zeros in the shapes of a model, which take no memory. `model` has its full shapes, or ZeRO 3 has noted them."""

    def __init__(self, model: torch.nn.Module):
        tensors = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
        self._shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors}

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        shape = self._shapes[name]
        if region is not None and shape:
            shape = torch.empty(shape, device="meta")[region].shape
        return torch.zeros(()).expand(shape)

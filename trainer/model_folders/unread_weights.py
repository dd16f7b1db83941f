"""Weights that are not read, because a checkpoint replaces them: zeros until then, which take no memory."""

import torch


class UnreadWeights:
    """In the place of the weights of a folder. `model` has its full shapes, or ZeRO 3 has noted them."""

    def __init__(self, model: torch.nn.Module):
        tensors = (*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
        self._shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors}

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        if region is not None and shape:
            shape = torch.empty(shape, device="meta")[region].shape
        return torch.zeros(()).expand(shape)

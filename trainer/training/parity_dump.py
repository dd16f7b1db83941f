"""`--parity_dump`: full gradients and weights as files, for a parity check."""

import os

from safetensors.torch import save_file


def dump(strategy, folder: str, name: str, iter_full, model) -> None:
    """Write full tensors for a parity check. Rank 0 holds all of them in host memory, so use it for small models."""
    full = {key: tensor.float().cpu().clone() for key, tensor in iter_full(model)}
    if strategy.is_rank_0():
        os.makedirs(folder, exist_ok=True)
        save_file(full, os.path.join(folder, f"{name}.safetensors"))

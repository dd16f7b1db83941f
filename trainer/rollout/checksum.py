"""A checksum of weights that notices every changed bit and every moved element, cheap on any device."""

import hashlib

import torch

PRIME = 65521  # as in Adler-32
CHUNK = 1 << 22
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_sum(tensor: torch.Tensor) -> int:
    """The sum over all elements of their bits as an integer times (position modulo PRIME + 1), modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().contiguous().flatten()
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].view(INTEGERS[tensor.element_size()]).to(torch.int64)
        places = torch.arange(start, start + len(bits), device=tensor.device) % PRIME + 1
        total += (bits * places).sum()
    return total.item()


class Checksum:
    """Of named tensors, in any order."""

    def __init__(self):
        self._sums: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._sums[name] = bits_sum(tensor)

    def hexdigest(self) -> str:
        text = "".join(f"{name}={value};" for name, value in sorted(self._sums.items()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

"""Write a safetensors file tensor by tensor. `safetensors.torch.save_file` wants all of them in memory at once.

The format is https://github.com/huggingface/safetensors#format: the length of the header in 8 bytes, the header as JSON,
the tensors end to end. Spaces may follow the JSON. So room for it is left at the start, and filled at the end.
"""

import json
from collections.abc import Iterator

import torch
from safetensors.torch import _TYPES

NAMES = {dtype: name for name, dtype in _TYPES.items()}
ROOM = 128 << 10  # bytes of a header, for some 900 tensors
PART_BYTES = 16 << 20


def file_parts(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file, in parts. Tensors that are on the CPU are not copied; others come part by part."""
    # wide elements first: so all are aligned
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    entries, size = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        offsets = [size, size + tensor.nbytes]
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        size = offsets[1]
    header = json.dumps(entries).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(PART_BYTES):
            yield memoryview(part.cpu().numpy())


class SafetensorsStream:
    """An open file. `add` tensors while they `fit`, then `close` it."""

    def __init__(self, path: str, max_bytes: int):
        """The file takes `max_bytes` of tensors, or one larger tensor."""
        self.max_bytes, self.size = max_bytes, 0
        self.entries: dict = {"__metadata__": {"format": "pt"}}
        self.header_bytes = len(json.dumps(self.entries))
        self.file = open(path, "wb")  # noqa: SIM115 (`close` ends it)
        self.file.seek(8 + ROOM)

    @property
    def names(self) -> list[str]:
        return [name for name in self.entries if name != "__metadata__"]

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor may come next: there is room, and its elements would be aligned, as readers want."""
        if not self.size:
            return True
        has_room = self.header_bytes + len(self._entry(name, tensor)) <= ROOM
        return has_room and self.size + tensor.nbytes <= self.max_bytes and self.size % tensor.itemsize == 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a CPU tensor."""
        self.header_bytes += len(self._entry(name, tensor))
        self.entries[name] = self._description(tensor)
        self.file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        self.size += tensor.nbytes

    def close(self) -> None:
        self.file.seek(0)
        self.file.write(ROOM.to_bytes(8, "little") + json.dumps(self.entries).encode().ljust(ROOM))
        self.file.close()

    def _entry(self, name: str, tensor: torch.Tensor) -> str:
        return json.dumps({name: self._description(tensor)})

    def _description(self, tensor: torch.Tensor) -> dict:
        offsets = [self.size, self.size + tensor.nbytes]
        return {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}

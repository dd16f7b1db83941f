"""Pinned host memory of the size that is needed. torch rounds its own up to a power of two: 600 MiB would take 1024.

torch's option `pinned_max_round_threshold_mb` is no way out in 2.13: a freed block of 4.5 MiB then serves a request of 7.
"""

import ctypes
import mmap
import weakref
from collections.abc import Iterable

import torch

SMALL = 2**16  # bytes: below, torch's own costs less than a call of the driver and a page that is not full


class _Pages(mmap.mmap):
    """Whole pages of host memory, registered with CUDA until nobody holds them."""

    def register(self) -> "_Pages":
        cuda, self.address = torch.cuda.cudart(), ctypes.addressof(ctypes.c_char.from_buffer(self))
        torch.cuda.check_error(cuda.cudaHostRegister(self.address, len(self), 0))
        self.unregister = cuda.cudaHostUnregister
        return self

    def __del__(self):
        if hasattr(self, "unregister"):
            self.unregister(self.address)


class PinnedPool:
    """Host tensors for copies from and to a GPU. Memory of a tensor that is gone serves the next one: pinning is slow.

    Nothing here waits for copies. Either one stream copies for a pool, or its user waits before a tensor goes.
    """

    def __init__(self):
        self._free: list[_Pages] = []

    def empty_like(self, tensor: torch.Tensor, pin_memory: bool = True) -> torch.Tensor:
        """A contiguous host tensor with the shape and dtype of `tensor`, without values."""
        size = tensor.numel() * tensor.element_size()
        if not pin_memory or size < SMALL:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
        pages = self._take(size)
        lease = (ctypes.c_char * size).from_buffer(pages)
        weakref.finalize(lease, self._free.append, pages).atexit = False
        return torch.frombuffer(lease, dtype=tensor.dtype).view(tensor.shape)

    def _take(self, size: int) -> _Pages:
        """The smallest free pages that are enough. If there are none, new pages replace the largest."""
        self._free.sort(key=len)
        place = next((place for place, pages in enumerate(self._free) if len(pages) >= size), None)
        if place is not None:
            return self._free.pop(place)
        del self._free[-1:]
        return _Pages(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE).register()


@torch.no_grad()
def pin_exactly(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors of the CPU to pinned memory, in place."""
    pool = PinnedPool()
    for tensor in tensors:
        tensor.data = pool.empty_like(tensor).copy_(tensor.data)

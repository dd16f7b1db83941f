"""Keep the decoder's tensors for the backward pass in host memory: with `recompute_layers`, the layers' inputs.

On a GPU, a separate stream copies them. One layer's input is copied out while the next layer runs. In the backward pass,
it is copied back while the layer after it runs.
"""

import functools
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.distributed.tensor import DTensor

from trainer.distributed.pinned_memory import PinnedPool


@dataclass
class _Kept:
    """One tensor in host memory. `layout` describes a DTensor. `back` and `ready` are the copy on the device."""

    host: torch.Tensor
    device: torch.device
    layout: Optional[dict]
    before: Optional["_Kept"]  # the tensor that was kept before this one: the backward pass needs it next
    back: Optional[torch.Tensor] = None
    ready: Any = None


class HostCopies:
    """The tensors of a model's forward pass. `keep` and `give` are the two hooks of `saved_tensors_hooks`.

    All passes share one stream. So host memory is filled again only after it was read.
    """

    def __init__(self):
        self._pool = PinnedPool()
        self._last: Optional[_Kept] = None
        self._copies = None  # the stream of the copies
        self._leaving = None  # (tensor, event): memory that its copy still reads

    def start(self) -> None:
        """Begin a forward pass. It does not hold what an earlier one kept."""
        self._last = None

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """Start the copy of a tensor to the host. For a DTensor (tp), the copy is this rank's part."""
        layout = None
        if isinstance(tensor, DTensor):
            layout = {"shape": tensor.shape, "stride": tensor.stride()}
            layout |= {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
            tensor = tensor.to_local()
        host = self._pool.empty_like(tensor, pin_memory=tensor.is_cuda)
        copied = self._copy(host, tensor)
        self._release()
        self._leaving = tensor, copied
        self._last = _Kept(host, tensor.device, layout, self._last)
        return self._last

    def give(self, kept: _Kept) -> torch.Tensor:
        """Return the tensor on its device, and start the copy of the one that is needed next."""
        self._release()
        self._last = None  # from now on, only the backward pass holds the tensors that it still needs
        for wanted in (kept, kept.before):
            if wanted is not None and wanted.back is None:
                wanted.back = torch.empty_like(wanted.host, device=wanted.device)
                wanted.ready = self._copy(wanted.back, wanted.host)
        _streams(kept.device).current_stream().wait_event(kept.ready)
        tensor, kept.back = kept.back, None
        return DTensor.from_local(tensor, run_check=False, **kept.layout) if kept.layout else tensor

    def _copy(self, target: torch.Tensor, source: torch.Tensor):
        """Copy on the other stream, after all work of the current stream so far. Return the event of the end."""
        streams = _streams(target.device if source.device.type == "cpu" else source.device)
        self._copies = self._copies or streams.Stream()
        self._copies.wait_stream(streams.current_stream())
        with streams.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()

    def _release(self) -> None:
        """Free the memory of the previous tensor: the next work of the current stream waits for the copy of it."""
        if self._leaving:
            tensor, copied = self._leaving
            _streams(tensor.device).current_stream().wait_event(copied)
            self._leaving = None


def _streams(device: torch.device):
    """torch.cuda, or torch.cpu, whose streams do everything at once."""
    return torch.get_device_module(device)


def offload_layer_inputs(model: torch.nn.Module) -> None:
    """Keep the decoder's saved tensors in host memory, in place. Not the head's: its weight would be copied as well."""
    decoder = model.base_model
    forward, copies = decoder.forward, HostCopies()

    @functools.wraps(forward)
    def offloaded(*args, **kwargs):
        copies.start()
        with torch.autograd.graph.saved_tensors_hooks(copies.keep, copies.give):
            return forward(*args, **kwargs)

    decoder.forward = offloaded

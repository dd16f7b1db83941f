"""Move tensors to host memory and back: frozen models that wait there, and storages that are empty for a while."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from trainer.distributed.sharded_tensors import to_local_if_dtensor


def keep_on_host(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Keep a frozen model's parameters in host memory.

    A forward pass copies them to `device` and then drops the copies. Buffers are small: they stay on `device`.
    Pinned memory is two to three times as fast, and nobody waits for the copies.
    """
    model.to("cpu")
    for parameter in model.parameters() if device.type == "cuda" else ():
        parameter.data = parameter.data.pin_memory()
    buffers = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    for module, name in buffers:
        setattr(module, name, getattr(module, name).to(device))
    places = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]
    parameters = {p for _, _, p in places}

    def put(on_device: bool) -> None:
        copies = {
            p: torch.nn.Parameter(p.to(device, non_blocking=True), requires_grad=False) if on_device else p
            for p in parameters
        }
        for module, name, parameter in places:  # tied parameters stay tied
            setattr(module, name, copies[parameter])

    model.register_forward_pre_hook(lambda *_: put(True))
    model.register_forward_hook(lambda *_: put(False), always_call=True)
    return model


@contextlib.contextmanager
def added_to_earlier(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, a backward pass finds no gradients. Afterwards, the earlier ones are added to the new ones.

    FSDP2 copies a gradient to host memory without waiting only where it has nothing to add it to.
    """
    earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None
    yield
    for parameter, total in earlier:
        if parameter.grad is not None:
            to_local_if_dtensor(total).add_(to_local_if_dtensor(parameter.grad))
        parameter.grad = total


def take_to_host(tensors: Iterable[torch.Tensor]) -> list[tuple]:
    """Copy the storages of `tensors` to host memory and free them on the device. `bring_back` reverses this.

    The same storages are emptied and filled again, so every view of them stays valid.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    # torch cannot free a storage that cannot be resized: a mapped file, pinned memory
    own = [storage for storage in storages.values() if storage.resizable()]
    copies = [(storage, storage.clone() if storage.device.type == "cpu" else storage.cpu()) for storage in own]
    for storage, _ in copies:
        storage.resize_(0)
    return copies


def bring_back(copies: list[tuple]) -> None:
    """Fill the storages that `take_to_host` emptied."""
    for storage, copy in copies:
        storage.resize_(copy.nbytes())
        storage.copy_(copy)

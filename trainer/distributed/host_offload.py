"""Move tensors to host memory and back: frozen models that wait there, and storages that are empty for a while."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from trainer.distributed.decoder_layers import decoder_layers
from trainer.distributed.pinned_memory import pin_exactly
from trainer.distributed.sharded_tensors import to_local_if_dtensor


def keep_on_host(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Keep a frozen model's parameters in host memory.

    A decoder layer copies its own to `device` for its forward pass, and then drops the copies. What is outside of the
    layers, such as the embedding, stays for the forward pass of the model. Buffers are small: they stay on `device`.
    Pinned memory is two to three times as fast, and nobody waits for the copies.
    """
    model.to("cpu")
    if device.type == "cuda":
        pin_exactly(model.parameters())
    buffers = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    for module, name in buffers:
        setattr(module, name, getattr(module, name).to(device))
    seen = set()
    for part in reversed([model, *decoder_layers(model).values()]):  # inner layers come first
        own = [module for module in part.modules() if module not in seen]
        seen.update(own)
        _bring_for_forward(part, own, device)
    return model


def _bring_for_forward(part: torch.nn.Module, modules: list[torch.nn.Module], device: torch.device) -> None:
    """Let each forward pass of `part` have the parameters that `modules` hold on `device`."""
    places = [(module, name, p) for module in modules for name, p in module.named_parameters(recurse=False)]
    parameters = {p for _, _, p in places}

    @torch.compiler.disable
    def put(on_device: bool) -> None:
        copies = {
            p: torch.nn.Parameter(p.to(device, non_blocking=True), requires_grad=False) if on_device else p
            for p in parameters
        }
        for module, name, parameter in places:  # tied parameters stay tied
            setattr(module, name, copies[parameter])

    part.register_forward_pre_hook(lambda *_: put(True))
    part.register_forward_hook(lambda *_: put(False), always_call=True)


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


def drop(tensors: Iterable[torch.Tensor]) -> list[tuple]:
    """Free the storages of `tensors`, whose values nobody needs again. `restore_room` reverses this, without values."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    sizes = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in sizes:
        storage.resize_(0)
    return sizes


def restore_room(sizes: list[tuple]) -> None:
    """Give the storages that `drop` emptied their sizes again. Their values are not set."""
    for storage, size in sizes:
        storage.resize_(size)

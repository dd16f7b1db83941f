"""What both strategies do in the same words: dtypes, random seeds, decay groups, moving a batch, and to host memory."""

import os
import random
from collections.abc import Iterable

import numpy as np
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def seed_everything(seed: int, deterministic: bool, device: torch.device) -> None:
    """Seed Python, NumPy and torch on every rank alike; ask CUDA for deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def decay_groups(named_parameters, weight_decay: float, num_dims=lambda parameter: parameter.ndim) -> list[dict]:
    """AdamW groups of the trainable parameters: weight decay on matrices and embeddings, none on norms and biases.

    `num_dims` tells how many dimensions a parameter has where sharding hides it.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if num_dims(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if num_dims(p) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def keep_on_host(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Keep a frozen model's parameters in host memory; a forward pass copies them to `device` and drops the copies after.

    Buffers are small and go to `device` for good.
    """
    model.to("cpu")
    buffers = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
    for module, name in buffers:
        setattr(module, name, getattr(module, name).to(device))
    places = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]
    parameters = {p for _, _, p in places}

    def put(on_device: bool) -> None:
        copies = {p: torch.nn.Parameter(p.to(device), requires_grad=False) if on_device else p for p in parameters}
        for module, name, parameter in places:  # tied parameters stay one
            setattr(module, name, copies[parameter])

    model.register_forward_pre_hook(lambda *_: put(True))
    model.register_forward_hook(lambda *_: put(False), always_call=True)
    return model


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer remembers of its parameters, beside the step counts; nothing before the first step."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]


def take_to_host(tensors: Iterable[torch.Tensor]) -> list[tuple]:
    """Copy what `tensors` are made of to host memory and free it on the device, for `bring_back`. It is storages that are
    emptied and filled again, so all views of them stay what they are."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    # what cannot be resized is not torch's to free: a mapped file, pinned memory
    own = [storage for storage in storages.values() if storage.resizable()]
    copies = [(storage, storage.clone() if storage.device.type == "cpu" else storage.cpu()) for storage in own]
    for storage, _ in copies:
        storage.resize_(0)
    return copies


def bring_back(copies: list[tuple]) -> None:
    for storage, copy in copies:
        storage.resize_(copy.nbytes())
        storage.copy_(copy)


def to_device(batch: dict, device: torch.device) -> dict:
    """The tensors of a micro-batch, and of a micro-batch within it, on `device`."""

    def moved(value):
        if isinstance(value, dict):
            return to_device(value, device)
        if not isinstance(value, torch.Tensor):
            return value
        pinned = device.type == "cuda" and value.device.type == "cpu"  # without it, the copy would be waited for
        return (value.pin_memory() if pinned else value).to(device, non_blocking=True)

    return {key: moved(value) for key, value in batch.items()}

"""What a forward pass keeps for backward: everything, only each decoder layer's input, or also the costly results."""

import functools

import torch
import torch.nn.attention.varlen  # defines torch_attn::_varlen_attn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from trainer.models.attention.model_call import keep_call

_aten = torch.ops.aten
# Products of matrices and attention cost most to compute again. They are small compared with the results between them:
# norms in fp32, rotary embeddings, activation functions (Korthikanti et al. 2022, Reducing Activation Recomputation).
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
    torch.ops.torch_attn._varlen_attn.default,
]
# the operations of flash-attn 2 and 3, once they are loaded
FLASH_ATTN = {
    "flash_attn": ("_flash_attn_forward", "_flash_attn_varlen_forward"),
    "flash_attn_3": ("_flash_attn_forward",),
}


def _keep_costly_results() -> tuple:
    """Return the contexts of a layer's forward pass and of its repetition."""
    calls = [(getattr(torch.ops, package), name) for package, names in FLASH_ATTN.items() for name in names]
    loaded = [getattr(package, name).default for package, name in calls if hasattr(package, name)]
    return create_selective_checkpoint_contexts(KEPT + loaded)


def recompute_layers(model: torch.nn.Module, selective: bool = False) -> None:
    """Compute each decoder layer again in the backward pass. With `selective`, keep what costs most."""
    contexts = _keep_costly_results if selective else noop_context_fn
    options = {"use_reentrant": False, "context_fn": functools.partial(keep_call, contexts)}
    model.gradient_checkpointing_enable(options)


def offload_layer_inputs(model: torch.nn.Module) -> None:
    """Keep in host memory what the decoder keeps for the backward pass: with `recompute_layers`, the layers' inputs.

    The head is not included, because its weight would be copied as well.
    """
    decoder = model.base_model
    forward = decoder.forward

    @functools.wraps(forward)
    def offloaded(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(*args, **kwargs)

    decoder.forward = offloaded


def _to_host(tensor: torch.Tensor) -> tuple:
    """Return (device, copy in host memory, mesh layout) of a tensor. From a GPU, the copy is pinned and nothing waits.

    For a DTensor (tp), the copy is this rank's part. torch's save_on_cpu does not support DTensors."""
    layout = None
    if isinstance(tensor, DTensor):
        layout = {"shape": tensor.shape, "stride": tensor.stride()}
        layout |= {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
        tensor = tensor.to_local()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=tensor.is_cuda), layout


def _from_host(packed: tuple) -> torch.Tensor:
    device, host, layout = packed
    tensor = host.to(device, non_blocking=True)
    return DTensor.from_local(tensor, run_check=False, **layout) if layout else tensor

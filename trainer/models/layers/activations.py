"""What a forward pass keeps for backward: everything, only each decoder layer's input, or also the costly results.

`activation_offload.py` moves it to host memory.
"""

import functools

import torch
import torch.nn.attention.varlen  # defines torch_attn::_varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from trainer.models.layers.model_call import keep_call

_aten = torch.ops.aten
# Products of matrices and attention cost most to compute again. They are small compared with the results between them:
# norms in fp32, rotary embeddings, activation functions (Korthikanti et al. 2022, Reducing Activation Recomputation).
KEPT = [
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default, torch.ops.torch_attn._varlen_attn.default,
]  # fmt: skip
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

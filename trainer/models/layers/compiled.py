"""`--compile`: torch.compile of each decoder layer, and of a step of decoding. One compilation serves all layers."""

from collections.abc import Callable

import torch

from trainer.distributed.decoder_layers import decoder_layers
from trainer.model_parallel.expert_parallel import are_experts

RECOMPILE_LIMIT = 64  # kinds of calls that each get their own code: training or not, lengths, roles of RLHF


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the decoder layers of `model` in place, at their first call. Names of weights do not change.

    Call this before a strategy shards the model: FSDP2's own hooks then stay outside the compiled code.
    """
    _prepare(model)
    for layer in decoder_layers(model).values():
        layer.compile()


def compile_decoding(model: torch.nn.Module) -> Callable:
    """`model`, compiled for calls that read one token per row. One code serves every number of rows and of keys."""
    _prepare(model)
    return torch.compile(model, dynamic=True)


def _prepare(model: torch.nn.Module) -> None:
    """Exclude experts, in place: torch fails to compile their grouped products in fp32, and the number of their tokens
    changes in every call."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for module in model.modules():
        if are_experts(module):
            module.forward = torch.compiler.disable(module.forward)

"""`--compile`: torch.compile of each decoder layer. This part of a model repeats: one compilation serves all layers."""

import torch

RECOMPILE_LIMIT = 64  # kinds of calls that each get their own code: training or not, lengths, roles of RLHF


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the decoder layers of `model` in place, at their first call. Names of weights do not change.

    Call this before a strategy shards the model: FSDP2's own hooks then stay outside the compiled code.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    layers = set(model._no_split_modules or [])
    for module in model.modules():
        if type(module).__name__ in layers:
            module.compile()

"""`--compile`: torch.compile of each decoder layer, the part of a model that repeats, so that one compilation serves all."""

import torch

RECOMPILE_LIMIT = 64  # kinds of calls (training or not, lengths, roles of RLHF) that each get code of their own


def compile_layers(model: torch.nn.Module) -> None:
    """Compile the decoder layers of `model` in place, at their first call; names of weights stay as they are.

    To be called before a strategy shards the model: FSDP2's own hooks stay outside of what is compiled.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    layers = set(model._no_split_modules or [])
    for module in model.modules():
        if type(module).__name__ in layers:
            module.compile()

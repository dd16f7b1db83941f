"""The decoder layers of a model: what is sharded, compiled, quantized or moved as one piece."""

import torch


def decoder_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """{name: layer}, outer ones first, of the classes in `_no_split_modules`. Mamba names inner parts too.

    Layers that FSDP2 has sharded are found too: it puts a class FSDP<name> in front of theirs.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return {n: part for n, part in model.named_modules() if type(part).__name__.removeprefix("FSDP") in kinds}

"""Functions of other packages take the arguments that we give them, in the installed version."""

import inspect


def test_torch_varlen_attention():
    """torch 2.11 has no enable_gqa; setup.py asks for a version that has it."""
    from torch.nn.attention.varlen import varlen_attn

    tensors, ends = [None] * 3, (None, None, 8, 8)
    options = {"scale": None, "window_size": (-1, 0), "enable_gqa": True}
    inspect.signature(varlen_attn).bind(*tensors, *ends, **options)

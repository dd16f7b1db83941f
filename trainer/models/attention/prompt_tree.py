"""Attention of a row in which each prompt comes once, followed by its answers (--share_prompts).

Each part of the row is causal attention of its own tokens. An answer also sees its whole prompt. Neither needs a mask, so
the fast kernels serve both, and the log-sum-exp merges them, as in `ring`.
"""

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Optional

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from trainer.errors import UserError
from trainer.models.attention.attention_call import read_call
from trainer.models.attention.ring import Segment, segment_attention
from trainer.models.layers.model_call import current_call, remember_call

NAME, FLAG = "shared_prompts", "--share_prompts"


@torch.compiler.disable  # otherwise every new list of bounds would be compiled again
def shared_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of a row of `collate_shared`. Inputs are (1, heads, tokens, head_dim).

    Returns (1, tokens, heads, head_dim). `prompt_bounds` of the model call say where the parts are.
    """
    call = read_call(module, query, attention_mask, kwargs, FLAG, "leave it out", packed=False)
    find = functools.partial(find_parts, current_call()["prompt_bounds"].tolist())
    return segment_attention(
        call.query, key, value, find, None, call.scale, softcap=call.softcap, sinks=call.sinks
    ), None


def find_parts(groups: Sequence[Sequence[int]], *_) -> list[Segment]:
    """Return the parts of the row's attention matrix with visible pairs. Each visible pair occurs once.

    Bounds (0, 2, 5, 7) are a prompt of 2 tokens and answers of 3 and 2. They give three causal blocks on the diagonal,
    and then queries [2, 7) x keys [0, 2).
    """
    own = [
        Segment(slice(start, end), slice(start, end), 0, causal=True, windowed=False, own=True)
        for bounds in groups
        for start, end in itertools.pairwise(bounds)
        if end > start
    ]
    prompts = [
        Segment(slice(end, bounds[-1]), slice(start, end), end - start, causal=False, windowed=False, own=False)
        for bounds in groups
        for start, end in [bounds[:2]]
        if bounds[-1] > end > start
    ]
    return own + prompts


def share_prompts(model) -> None:
    """Give a loaded model this attention, in place.

    Raises:
        UserError: a layer of `model` does not see all tokens, or the model takes no positions.
    """
    layers = DynamicCache(config=model.config).layers
    is_plain = layers and all(type(layer) is DynamicLayer for layer in layers)
    is_plain = is_plain and model.config._attn_implementation == "sdpa"
    if not (is_plain and "position_ids" in inspect.signature(model.forward).parameters):
        found = f"the layers of {type(model).__name__} cannot share a prompt"
        raise UserError(FLAG, found, "models whose layers all have full attention")
    AttentionInterface.register(NAME, shared_attention)
    model.set_attn_implementation(NAME)
    remember_call(model)

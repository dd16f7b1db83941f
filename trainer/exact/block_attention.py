"""Causal attention over fixed blocks of keys: a query has the same bits alone, with an engine's cache, and in a whole sample.

Kernels of attention choose their blocks by the numbers of queries and keys. Here every product has 32 keys, and blocks add
up one after the other. Keys that a query does not see add zeros, so it does not matter how many there are.
"""

import functools
import operator
from typing import Optional

import torch
import torch.nn.functional as F

from trainer.exact.exact_products import ROWS
from trainer.exact.fixed_tiles import product

BLOCK = 32  # keys


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: Optional[int] = None,
) -> torch.Tensor:
    """Return softmax(scale query key^T) value, (rows, heads, tokens, head_dim), of fp32 tensors. Autograd has its gradient.

    `query` is (rows, heads, tokens, head_dim), at `positions` (rows, tokens). Keys and values are (rows, kv_heads, keys,
    head_dim), and key i has position i. A query at p sees the keys p - window < i <= p.
    """
    rows, heads, tokens, _ = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    places = positions[:, None, None].expand(rows, kv_heads, group, tokens).reshape(rows * kv_heads, -1, 1)
    padding = -group * tokens % ROWS  # a row of a product then does not depend on the number of rows
    flat = F.pad(query.reshape(rows * kv_heads, group * tokens, -1), (0, 0, 0, padding))
    places = F.pad(places, (0, 0, 0, padding))
    keys, values = (
        F.pad(states, (0, 0, 0, -num_keys % BLOCK)).flatten(0, 1).split(BLOCK, 1) for states in (key, value)
    )
    scores = []
    for number, block in enumerate(keys):
        distance = places - torch.arange(number * BLOCK, (number + 1) * BLOCK, device=places.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores.append((product(flat, block.transpose(1, 2)) * scale).masked_fill(hidden, float("-inf")))
    highest = functools.reduce(torch.maximum, [part.detach().amax(-1, keepdim=True) for part in scores])
    weights = [(part - highest).exp() for part in scores]
    total = functools.reduce(operator.add, [part.sum(-1, keepdim=True) for part in weights])
    out = functools.reduce(operator.add, [product(part, block) for part, block in zip(weights, values)]) / total
    return out[:, : group * tokens].reshape(rows, heads, tokens, -1)

"""Attention of one block whose scores have a soft cap (Gemma 2), in plain matrix products. kernels.py specifies it.

Scores of a few queries exist at a time, in fp32. No kernel of torch has soft caps: on a GPU this is correct, but slow.
"""

from collections.abc import Iterator
from typing import Optional

import torch

MAX_SCORES = 2**25  # how many scores exist at a time: 128 MiB each for scores, shares and their gradients


def capped_forward(
    query, key, value, scale: float, causal: bool, mask: Optional[torch.Tensor], softcap: float
) -> tuple:
    """Return (out, lse) in fp32, of a block as in trainer.models.attention.kernels.block_forward."""
    key, value = (_grouped(tensor) for tensor in (key, value))
    outs, lses = [], []
    for rows, keys in _tiles(query, key, causal):
        capped = _capped(query, key, rows, keys, scale, softcap)
        capped = _masked(capped, rows, causal, mask)
        lses.append(capped.logsumexp(-1))
        outs.append((capped - lses[-1][..., None]).exp() @ value[..., keys, :])
    return (torch.cat(parts, dim).flatten(1, 2) for parts, dim in ((outs, -2), (lses, -1)))


def capped_backward(
    dout, query, key, value, out, lse, scale: float, causal: bool, mask: Optional[torch.Tensor], softcap: float
) -> tuple:
    """Return (dquery, dkey, dvalue) in fp32, as in trainer.models.attention.kernels.block_backward.

    With scores s, capped scores c = softcap * tanh(s / softcap) and shares P = exp(c + mask - lse): dc = P (dP - D) and
    ds = dc (1 - (c / softcap)^2), where D = sum(dout * out) per query."""
    num_groups = key.shape[1]
    key, value = (_grouped(tensor) for tensor in (key, value))
    dquery, dkey, dvalue = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (query, key, value))
    dquery = dquery.unflatten(1, (num_groups, -1))
    dout, out, lse = (tensor.float().unflatten(1, (num_groups, -1)) for tensor in (dout, out, lse))
    sums = (dout * out).sum(-1)  # D
    for rows, keys in _tiles(query, key, causal):
        capped = _capped(query, key, rows, keys, scale, softcap)
        shares = (_masked(capped, rows, causal, mask) - lse[..., rows, None]).exp()
        dshares = dout[..., rows, :] @ value[..., keys, :].mT
        dscores = scale * shares * (dshares - sums[..., rows, None]) * (1 - (capped / softcap).square())
        dquery[..., rows, :] = dscores @ key[..., keys, :]
        dkey[..., keys, :] += (dscores.mT @ _grouped_query(query, key)[..., rows, :]).sum(2, keepdim=True)
        dvalue[..., keys, :] += (shares.mT @ dout[..., rows, :]).sum(2, keepdim=True)
    return dquery.flatten(1, 2), dkey.squeeze(2), dvalue.squeeze(2)


def _grouped(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, kv_heads, tokens, head_dim) -> (rows, kv_heads, 1, tokens, head_dim) fp32, for all queries of a group."""
    return tensor.float()[:, :, None]


def _grouped_query(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query.float().unflatten(1, (key.shape[1], -1))  # (rows, kv_heads, heads of a group, tokens, head_dim)


def _capped(query, key, rows: slice, keys: slice, scale: float, softcap: float) -> torch.Tensor:
    scores = _grouped_query(query, key)[..., rows, :] @ key[..., keys, :].mT
    return softcap * (scale / softcap * scores).tanh()


def _masked(capped: torch.Tensor, rows: slice, causal: bool, mask: Optional[torch.Tensor]) -> torch.Tensor:
    if mask is not None:
        return capped + mask[:, :, None, rows].float()
    if not causal:
        return capped
    places = torch.arange(rows.start, rows.stop, device=capped.device)
    return capped.masked_fill(places[:, None] < torch.arange(capped.shape[-1], device=capped.device), float("-inf"))


def _tiles(query: torch.Tensor, key: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield (queries, keys) of a few queries at a time. Causal queries need no keys after the last of them."""
    num_queries, num_keys = query.shape[2], key.shape[3]
    size = max(MAX_SCORES // (query.shape[0] * query.shape[1] * num_keys), 1)
    for start in range(0, num_queries, size):
        end = min(start + size, num_queries)
        yield slice(start, end), slice(0, end if causal else num_keys)

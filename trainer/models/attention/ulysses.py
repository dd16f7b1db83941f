"""Attention over a split sequence by exchanging heads for tokens (Jacobs et al. 2023, DeepSpeed Ulysses).

One all-to-all gives each rank all tokens of its heads. A second one takes the result back. Between them, attention
works as for a packed row on one rank.
"""

import math
from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist

from trainer.datasets.batches.packing import HostBounds
from trainer.datasets.batches.sequence_split import natural_order, zigzag_order
from trainer.distributed.gradient_collectives import AllToAll
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.models.attention.varlen import varlen_attention_forward


def validate_ulysses(num_heads: int, sp_size: int) -> None:
    """Raise UserError unless `sp_size` divides the query heads. Under tp, `num_heads` is per tp rank."""
    if num_heads % sp_size:
        fits = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
        found = f"ulysses over {counted(sp_size, 'rank')}, which do not divide {counted(num_heads, 'head')}"
        raise UserError("--sp_mode", found, f"ring; ulysses with --ring_attn_size {fits}")


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int],
    window: Optional[int],
    scale: float,
    group: dist.ProcessGroup,
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Compute attention over the ranks of `group`, as trainer.models.attention.ring.ring_attention specifies."""
    validate_ulysses(query.shape[1], group.size())
    # where the ranks do not divide the KV heads, each KV head is repeated, next to itself
    repeats = math.lcm(key.shape[1], group.size()) // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    module = torch.nn.Module()  # gives the head ratio to transformers' sdpa, which repeats KV heads if needed
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    if sinks is not None:
        sinks = sinks.chunk(group.size())[group.rank()]
    cu_seqlens = torch.tensor(bounds)
    out, _ = varlen_attention_forward(
        module, *(gather_tokens(tensor, group) for tensor in (query, key, value)), None,
        cu_seqlens=cu_seqlens, cu_seqlens_host=HostBounds(bounds), sliding_window=window, scaling=scale,
        softcap=softcap, s_aux=sinks,
    )  # fmt: skip
    return gather_heads(out, group)


def gather_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Zigzag order (rows, heads, tokens / sp, head_dim) -> token order (rows, heads / sp, tokens, head_dim)."""
    by_rank = torch.stack(tensor.chunk(group.size(), dim=1))
    received = AllToAll.apply(by_rank, group, None, None)  # (sp, rows, heads / sp, tokens / sp, head_dim)
    return natural_order(torch.cat(received.unbind(), dim=2), group.size(), dim=2)


def gather_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Token order (rows, tokens, heads / sp, head_dim) -> zigzag order (rows, tokens / sp, heads, head_dim)."""
    by_rank = torch.stack(zigzag_order(tensor, group.size()).chunk(group.size(), dim=1))
    received = AllToAll.apply(by_rank, group, None, None)  # (sp, rows, tokens / sp, heads / sp, head_dim)
    return torch.cat(received.unbind(), dim=2)

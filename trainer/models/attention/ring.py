"""Causal attention over a row of tokens that is split over a sequence-parallel group, as a ring of key-value blocks.

Each rank keeps its queries. Keys and values go once around the ring (Liu et al. 2023, Ring Attention with Blockwise
Transformers). The log-sum-exp merges the partial results of the blocks (Milakov & Gimelshein 2018, Online normalizer
calculation for softmax). Backward sends keys and values around again, together with fp32 sums of their gradients.
Between passes, a rank holds only its own query, key, value, out and lse: O(tokens / sp) memory.

Ranks hold zigzag shards, see trainer.datasets.batches.sequence_split. Packed documents never attend to each other. On
one rank (no group), the same code serves packed rows whose attention has sinks or a soft cap.

A sink is one more score in the softmax of each query, without a key. A query's own rank adds it once, after all blocks.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.models.attention.kernels import block_backward, block_forward, unit_stride

TILE = 1024  # queries that share one window mask; a long document with a window takes many masks, not a huge one


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Sequence[int],
    window: Optional[int],
    scale: float,
    group: Optional[dist.ProcessGroup],
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Compute attention within each document [bounds[n], bounds[n + 1]) of the whole row, over the ranks of `group`.

    Inputs are zigzag shards: query (rows, heads, tokens / sp, head_dim), key (rows, kv_heads, ...) and value (rows,
    kv_heads, ..., value_dim). Output: (rows, tokens / sp, heads, value_dim). A query sees keys at distance
    0 <= q - k < `window`. With None, the distance has no limit. Scores become softcap * tanh(scores / softcap). `sinks`
    (heads,) are scores without a key (Xiao et al. 2023; gpt-oss). The gradient of the sinks is the share of this rank's
    queries. Without a group, inputs are whole rows.
    """
    find = functools.partial(find_segments, bounds=bounds, window=window)
    return segment_attention(query, key, value, find, window, scale, group, softcap, sinks)


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    find: Callable[[int, int, int, int], list["Segment"]],
    window: Optional[int],
    scale: float,
    group: Optional[dist.ProcessGroup] = None,
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Compute attention of the pairs that `find(rank, source, sp_size, num_local)` returns. Other values: `ring_attention`."""
    value_dim = value.shape[-1]
    if value_dim != key.shape[-1]:  # zeros change neither scores nor outputs, and kernels need one size
        size = max(value_dim, key.shape[-1])
        query, key, value = (F.pad(tensor, (0, size - tensor.shape[-1])) for tensor in (query, key, value))
    out = _RingAttention.apply(query, key, value, sinks, find, window, scale, softcap, group)
    return out[..., :value_dim].transpose(1, 2)


class Segment(NamedTuple):
    """One document's share of a pair of chunks: local queries x local keys of the visiting block."""

    queries: slice
    keys: slice
    distance: int  # position of the first query minus position of the first key, both in the whole row
    causal: bool  # queries and keys are the same tokens, and no window cuts them
    windowed: bool  # only a part of the pairs is visible: a mask says which
    own: bool  # both are of the same chunk; these keys come first, and each query has one such segment


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, find, window, scale, softcap, group):
        query, key, value = (unit_stride(tensor) for tensor in (query, key, value))
        ctx.find, ctx.window, ctx.scale, ctx.softcap, ctx.group = find, window, scale, softcap, group
        rank, size = _place(group)
        out = torch.zeros_like(query, dtype=_dtype_of_sums(query))
        lse = out.new_full(query.shape[:3], float("-inf"))
        for source, (block_key, block_value) in _circulate(torch.stack((key, value)), group):
            for segment in find(rank, source, size, query.shape[2]):
                q, k = segment.queries, segment.keys
                part = block_forward(
                    query[:, :, q], block_key[:, :, k], block_value[:, :, k],
                    scale, segment.causal, _window_mask(segment, window, query), softcap,
                )  # fmt: skip
                if segment.own:  # nothing to merge with yet
                    out[:, :, q], lse[:, :, q] = part
                else:
                    _merge(out[:, :, q], lse[:, :, q], *part)
        if sinks is not None:
            without_sink = lse.clone()
            lse = torch.logaddexp(lse, sinks.float()[:, None])
            out *= (without_sink - lse).exp()[..., None]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        group, window, dout = ctx.group, ctx.window, unit_stride(dout)
        rank, size = _place(group)
        dquery = torch.zeros_like(query, dtype=_dtype_of_sums(query))
        finish_sums = None
        for source, block in _circulate(torch.stack((key, value)), group):
            dblock = torch.zeros_like(block, dtype=_dtype_of_sums(block))
            for segment in ctx.find(rank, source, size, query.shape[2]):
                q, k = segment.queries, segment.keys
                dq, dk, dv = block_backward(
                    dout[:, :, q], query[:, :, q], block[0, :, :, k], block[1, :, :, k], out[:, :, q], lse[:, :, q],
                    ctx.scale, segment.causal, _window_mask(segment, window, query), ctx.softcap,
                )  # fmt: skip
                dquery[:, :, q] += dq
                dblock[0, :, :, k] += dk
                dblock[1, :, :, k] += dv
            if finish_sums is not None:  # the sums of earlier ranks for this block have arrived
                dblock += finish_sums()
            finish_sums = _start_shift(dblock, group)
        dkey, dvalue = finish_sums()  # after one shift per rank, each block's sums are back at its owner
        grads = dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)
        return *grads, _sink_gradient(sinks, dout, out, lse), None, None, None, None, None


def _sink_gradient(sinks: Optional[torch.Tensor], dout, out, lse) -> Optional[torch.Tensor]:
    """Return the gradient (heads,). The sink's value is 0, so dP = 0 in dS = P (dP - D), with D = sum(dout * out)."""
    if sinks is None:
        return None
    share = (sinks.float()[:, None] - lse).exp()  # (rows, heads, tokens)
    return -(share * (dout.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)


def find_segments(
    rank: int, source: int, sp_size: int, num_local: int, bounds: Sequence[int], window: Optional[int], tile: int = TILE
) -> list[Segment]:
    """Return the parts of (queries of `rank`) x (keys of `source`) with visible pairs. Each visible pair occurs once.

    Example: two ranks with 4 local tokens each, one document. Rank 1 holds tokens 2 3 4 5, rank 0 tokens 0 1 6 7. Both
    chunks of rank 1 see keys 0 1 of rank 0: queries [0, 2) x keys [0, 2) and queries [2, 4) x keys [0, 2).
    A segment that a window cuts has at most `tile` queries, and only the keys in their reach.
    """
    num_chunks = 1 if sp_size == 1 else 2  # one rank holds the row in its own order, not cut in halves
    size = num_local // num_chunks
    halves = (enumerate((owner, 2 * sp_size - 1 - owner)[:num_chunks]) for owner in (rank, source))
    segments = []
    pairs = sorted(itertools.product(*halves), key=lambda pair: pair[0][1] != pair[1][1])  # a chunk with itself first
    for (query_half, query_chunk), (key_half, key_chunk) in pairs:
        if key_chunk > query_chunk:
            continue
        to_local = (query_half - query_chunk) * size, (key_half - key_chunk) * size
        # documents in both chunks: for different chunks it is at most the one that reaches from one to the other
        first = bisect.bisect_right(bounds, query_chunk * size) - 1
        last = bisect.bisect_left(bounds, (min(query_chunk, key_chunk) + 1) * size)
        for start, end in itertools.pairwise(bounds[first : max(last, first + 1) + 1]):
            q = max(start, query_chunk * size), min(end, (query_chunk + 1) * size)
            k = max(start, key_chunk * size), min(end, (key_chunk + 1) * size)
            if query_chunk != key_chunk and window is not None:  # drop queries and keys with nothing in reach
                q, k = (q[0], min(q[1], k[1] - 1 + window)), (max(k[0], q[0] - window + 1), k[1])
            if q[0] >= q[1] or k[0] >= k[1]:
                continue
            if window is None or q[1] - 1 - k[0] < window:
                segments.append(_segment(q, k, to_local, query_chunk == key_chunk, window))
                continue
            for first in range(q[0], q[1], tile):
                last = min(first + tile, q[1])
                keys = max(k[0], first - window + 1), min(k[1], last)
                segments.append(_segment((first, last), keys, to_local, query_chunk == key_chunk, window))
    return segments


def _segment(q: tuple, k: tuple, to_local: tuple, diagonal: bool, window: Optional[int]) -> Segment:
    """Return the segment of row positions `q` x `k`, each (start, end). Adding `to_local` gives local positions."""
    windowed = window is not None and q[1] - 1 - k[0] >= window
    windowed = windowed or (diagonal and q != k and q[1] - q[0] > 1)  # neither a square nor all visible
    local_q, local_k = (slice(start + shift, end + shift) for (start, end), shift in zip((q, k), to_local))
    return Segment(local_q, local_k, q[0] - k[0], diagonal and q == k and not windowed, windowed, diagonal)


def _window_mask(segment: Segment, window: Optional[int], query: torch.Tensor) -> Optional[torch.Tensor]:
    """Return the additive mask (1, 1, queries, keys) of a segment that the window cuts, or None if it needs no mask."""
    if not segment.windowed:
        return None
    num_queries, num_keys = (part.stop - part.start for part in (segment.queries, segment.keys))
    positions = torch.arange(num_queries, device=query.device)[:, None] + segment.distance
    distance = positions - torch.arange(num_keys, device=query.device)
    hidden = (distance < 0) | (distance >= window)
    return query.new_zeros(1, 1, num_queries, num_keys).masked_fill_(hidden, float("-inf"))


def _merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge a block into the running fp32 `out` and `lse`, in place. The softmax then covers both sets of keys."""
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp()[..., None]).add_(block_out * (block_lse - merged).exp()[..., None])
    lse.copy_(merged)


def _dtype_of_sums(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _place(group: Optional[dist.ProcessGroup]) -> tuple[int, int]:
    """Return (rank, size) of a group. No group is one rank."""
    return (0, 1) if group is None else (group.rank(), group.size())


def _circulate(block: torch.Tensor, group: Optional[dist.ProcessGroup]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (owner's rank, block) for every rank of `group`, this rank first. The next block is sent meanwhile."""
    rank, size = _place(group)
    for step in range(size):
        finish = _start_shift(block, group) if step + 1 < size else None
        yield (rank - step) % size, block
        block = finish() if finish else block


def _start_shift(tensor: torch.Tensor, group: Optional[dist.ProcessGroup]) -> Callable[[], torch.Tensor]:
    """Start to send `tensor` to the next rank of `group`. The returned function waits for the previous rank's tensor."""
    if _place(group)[1] == 1:
        return lambda: tensor
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(group.rank() + 1) % group.size())
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(group.rank() - 1) % group.size())
    works = dist.batch_isend_irecv([send, receive])

    def finish() -> torch.Tensor:
        for work in works:
            work.wait()
        return received

    return finish

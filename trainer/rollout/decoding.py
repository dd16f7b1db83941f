"""Faster generation with transformers' KV cache: memory is reserved once, and shared key heads are not copied."""

from typing import Optional

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_for_decoding"
FEW_KEYS = 512  # sdpa's CPU kernel is for many queries; up to here, plain products are 1 to 4 times as fast in fp32


class _ReservedLayer(DynamicLayer):
    """Keys and values of one layer, with memory for `length` tokens. A new token is written to its place.
    Transformers' own layer copies all earlier tokens for each new one."""

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append keys and values (rows, heads, tokens, head_dim). Returns all keys and values so far."""
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = tuple(_room(states, self.length) for states in (key_states, value_states))
        end = start + key_states.shape[-2]
        for room, states in zip(self._rooms, (key_states, value_states)):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        end = self.get_seq_length()
        if end == 0:  # this layer takes its keys from another one
            return
        self._rooms = tuple(room[indices] for room in self._rooms)
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)


def _room(states: torch.Tensor, length: int) -> torch.Tensor:
    return states.new_zeros(*states.shape[:-2], length, states.shape[-1])


def make_cache(config, length: int) -> DynamicCache:
    """A cache for up to `length` tokens. Layers without plain attention keep the cache class of transformers."""
    cache = DynamicCache(config=config)
    cache.layers = [_ReservedLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def register_attention() -> str:
    """Register `decoding_attention` with transformers. Returns its name there."""
    AttentionInterface.register(NAME, decoding_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def decoding_attention(module, query, key, value, attention_mask, *, scaling=None, **kwargs):
    """sdpa, without copies of shared key heads when there is one new token per row.

    Query heads (rows, heads, 1, head_dim) that share a key head are treated as several queries of that head. The sums
    are the same, and the keys are not repeated for each query head.
    """
    rows, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    # a learned bias differs from head to head
    if num_tokens > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    is_boolean = attention_mask is None or attention_mask.dtype == torch.bool
    if query.device.type == "cpu" and query.dtype == torch.float32 and key.shape[2] <= FEW_KEYS and is_boolean:
        out = _by_products(grouped, key, value, attention_mask, scaling)
    else:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, num_heads, out.shape[-1]), None


def _by_products(query, key, value, mask: Optional[torch.Tensor], scaling: Optional[float]) -> torch.Tensor:
    """softmax(query key^T) value as two batched products over (rows x key heads); `mask` is boolean."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.bmm((query * scaling).flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        scores = scores.view(*query.shape[:-1], -1).masked_fill(~mask, float("-inf")).flatten(0, 1)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(*query.shape[:-1], -1)

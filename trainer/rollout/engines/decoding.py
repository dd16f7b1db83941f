"""Continue a batch of rows token by token: with transformers' cache, or without one if it does not fit the model.

The cache is fast: memory for keys and values is reserved once, and shared key heads are not copied.
"""

import inspect
from collections.abc import Sequence
from math import inf
from typing import Optional

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
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
            self._rooms = tuple(_room(states, self.length, len(states)) for states in (key_states, value_states))
        end = start + key_states.shape[-2]
        for room, states in zip(self._rooms, (key_states, value_states)):
            room[..., start:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, rows: torch.Tensor) -> None:
        end = self.get_seq_length()
        if end == 0:  # this layer takes its keys from another one
            return
        rooms = tuple(_room(room, self.length, len(rows)) for room in self._rooms)
        for room, former in zip(rooms, self._rooms):
            torch.index_select(former[..., :end, :], 0, rows, out=room[..., :end, :])
        self._rooms = rooms
        self.keys, self.values = (room[..., :end, :] for room in self._rooms)


def _room(states: torch.Tensor, length: int, rows: int) -> torch.Tensor:
    return states.new_empty(rows, *states.shape[1:-2], length, states.shape[-1])


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


# --- rows that continue


def can_cache(model) -> bool:
    """Whether `model` gives the same logits with transformers' cache as without it.

    It does not in four cases. The model has a cache class of its own. It keeps states in its modules (RecurrentGemma).
    Its Mamba layers limit the size of time steps, which transformers does only without a cache (Nemotron-H, Zamba 2). Or
    their norm takes a single token for a row (Falcon-H1 with mamba_rms_norm).
    """
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return False
    if not model._supports_default_dynamic_cache():
        return False
    layers = DynamicCache(config=model.config).layers
    known = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    has_states = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
    has_keys = any(isinstance(layer, DynamicLayer) for layer in layers)
    plain = all(type(layer) in known or isinstance(layer, LinearAttentionLayer) for layer in layers)
    limits = [vars(module).get("time_step_limit") or (0, inf) for module in model.modules()]
    unlimited = all(low <= 0 and high == inf for low, high in limits)
    takes_tokens = all(type(module).__name__ != "FalconH1RMSNormGated" for module in model.modules())
    return plain and has_keys and has_states >= model._is_stateful and unlimited and takes_tokens


class CachedRows:
    """Rows of tokens, padded on the left, that continue with a cache. Equal prompts are read once.

    `images` has the images of each prompt. `read(ids, mask, images)` returns the further arguments that the model needs to
    read them. `compiled` reads single tokens in place of `model`, see `layers.compiled`.
    """

    def __init__(
        self,
        model,
        prompts: Sequence[Sequence[int]],
        pad_token_id: int,
        max_new_tokens: int,
        images=(),
        read=None,
        compiled=None,
    ):
        self.model, self.known = model, inspect.signature(model.forward).parameters
        self.next_model = model if compiled is None else compiled
        # equal prompts have one row; their rows then continue from copies of the same cache
        keys = list(zip(map(tuple, prompts), images or [()] * len(prompts), strict=True))
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.copies = torch.tensor([places[key] for key in keys], device=model.device)
        longest = max(len(prompt) for prompt, _ in places)
        ids = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt, _ in places]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in places]
        self.ids, self.mask = (torch.tensor(rows, device=model.device) for rows in (ids, mask))
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.extra = read(self.ids, self.mask, [images for _, images in places]) if read else {}
        self.positions = self.extra.pop("position_ids", self.positions)  # Qwen: (3, rows, tokens)
        self.cache = make_cache(model.config, longest + max_new_tokens)

    def first(self) -> torch.Tensor:
        """The logits (rows, vocab) after each prompt."""
        logits = self._logits(self.model, self.ids, **self.extra)
        if len(self.ids) == len(self.copies):
            return logits
        self.keep(self.copies)
        return logits[self.copies]

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row. The logits (rows, vocab) after it."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self.positions = self.positions[..., -1:] + 1
        return self._logits(self.next_model, tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Continue only with these rows, in this order."""
        self.cache.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[..., rows, :]

    def _logits(self, model, input_ids: torch.Tensor, **extra) -> torch.Tensor:
        options = {"position_ids": self.positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self.known} | extra
        out = model(
            input_ids=input_ids, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **options
        )
        return out.logits[:, -1]


class UncachedRows:
    """Rows of tokens that are read again for each new token. Rows of one length run together, so nothing is padded."""

    def __init__(self, model, prompts: Sequence[Sequence[int]], pad_token_id: int, max_new_tokens: int):
        self.model, self.rows = model, [list(prompt) for prompt in prompts]
        self.options = {"use_cache": False}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.options["logits_to_keep"] = 1

    def first(self) -> torch.Tensor:
        """The logits (rows, vocab) after each prompt."""
        logits: list = [None] * len(self.rows)
        for length in {len(row) for row in self.rows}:
            places = [place for place, row in enumerate(self.rows) if len(row) == length]
            ids = torch.tensor([self.rows[place] for place in places], device=self.model.device)
            for place, row in zip(places, self.model(input_ids=ids, **self.options).logits[:, -1]):
                logits[place] = row
        return torch.stack(logits)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row. The logits (rows, vocab) after it."""
        for row, token in zip(self.rows, tokens.tolist()):
            row.append(token)
        return self.first()

    def keep(self, rows: torch.Tensor) -> None:
        """Continue only with these rows, in this order."""
        self.rows = [self.rows[row] for row in rows.tolist()]

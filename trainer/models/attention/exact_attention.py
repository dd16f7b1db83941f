"""--exact: attention of samples that --ring_attn_size splits, with the bits of one rank. Each head sees a whole sample.

A ring gathers all heads on every rank. Ulysses exchanges heads for tokens, so a rank has its share of the heads.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.errors import UserError
from trainer.exact.split_rows import Own, SplitRows, Whole
from trainer.models.attention.attention_call import read_call
from trainer.models.attention.ulysses import gather_heads, gather_tokens


def exact_attention(mode: str, split: SplitRows) -> Callable:
    """Return a function for transformers' AttentionInterface. Mode is "ring" or "ulysses".

    It raises UserError for attention that is not that of sdpa, and for KV heads that Ulysses would have to repeat.
    """
    gather, scatter = (_all_heads, _own_tokens) if mode == "ring" else (_own_heads, _all_tokens)

    def forward(module, query, key, value, attention_mask=None, **kwargs):
        call = read_call(module, query, attention_mask, kwargs, "--ring_attn_size", "1", packed=False)
        if call.softcap is not None or call.sinks is not None or call.chunk is not None:
            found = "equal bits of split samples are not proved for soft caps, sinks and chunks of attention"
            raise UserError("--exact", found, "--ring_attn_size 1")
        if mode == "ulysses" and key.shape[1] % split.size:
            found = f"ulysses over {split.size} ranks, which do not divide the {key.shape[1]} KV heads of a rank"
            raise UserError("--exact", found, "--sp_mode ring")
        query, key, value = (gather(tensor, split) for tensor in (call.query, key, value))
        mask = _window_mask(split.num_tokens, call.window)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=call.scale, is_causal=True)
        return scatter(out, split), None

    return forward


def _all_heads(tensor: torch.Tensor, split: SplitRows) -> torch.Tensor:
    return Whole.apply(tensor, split, 2)


def _own_tokens(out: torch.Tensor, split: SplitRows) -> torch.Tensor:
    return Own.apply(out, split, 1)


def _own_heads(tensor: torch.Tensor, split: SplitRows) -> torch.Tensor:
    return gather_tokens(tensor, split.group)[:, :, : split.num_tokens]


def _all_tokens(out: torch.Tensor, split: SplitRows) -> torch.Tensor:
    padding = -out.shape[1] % (2 * split.size)
    return gather_heads(F.pad(out, (0, 0, 0, 0, 0, padding)), split.group)


def _window_mask(length: int, window: Optional[int]) -> Optional[torch.Tensor]:
    """Return the mask of transformers for a sliding window, (1, 1, length, length). It has none for a shorter sample."""
    if window is None or length < window:
        return None
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return ((distance >= 0) & (distance < window))[None, None]

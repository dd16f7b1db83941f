"""--exact: attention of samples that --ring_attn_size splits, with the bits of one rank. Each head sees a whole sample.

With rollouts, it is attention over fixed blocks, also of samples that are not split. A ring gathers all heads on every rank. Ulysses exchanges heads for tokens, so a rank has its share of the heads.
"""

from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.errors import UserError
from trainer.exact.block_attention import block_attention
from trainer.exact.split_rows import Own, SplitRows, Whole
from trainer.metrics import counted
from trainer.models.attention.attention_call import read_call
from trainer.models.attention.ulysses import gather_heads, gather_tokens


def exact_attention(mode: str, split: SplitRows, by_blocks: bool = False) -> Callable:
    """Return a function for transformers' AttentionInterface. Mode is "ring", "ulysses" or "whole".

    It is sdpa of a whole sample, or `block_attention` if `by_blocks`. It raises UserError for attention that is neither,
    and for KV heads that Ulysses would have to repeat.
    """
    gather, scatter = MODES[mode]
    flag, allowed = ("--exact", "another model") if mode == "whole" else ("--ring_attn_size", "1")

    def forward(module, query, key, value, attention_mask=None, **kwargs):
        call = read_call(module, query, attention_mask, kwargs, flag, allowed, packed=False)
        if call.softcap is not None or call.sinks is not None or call.chunk is not None:
            found = "equal bits are not proved for soft caps, sinks and chunks of attention"
            raise UserError("--exact", f"{found} here", f"{flag} {allowed}".removeprefix("--exact "))
        if mode == "ulysses" and key.shape[1] % split.size:
            found = (
                f"ulysses over {counted(split.size, 'rank')}, which do not divide the {key.shape[1]} KV heads of a rank"
            )
            raise UserError("--exact", found, "--sp_mode ring")
        query, key, value = (gather(tensor, split) for tensor in (call.query, key, value))
        if by_blocks:
            positions = torch.arange(query.shape[2])[None]
            out = block_attention(query, key, value, positions, call.scale, call.window).transpose(1, 2)
            return scatter(out, split), None
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


def _unchanged(tensor: torch.Tensor, _split: SplitRows) -> torch.Tensor:
    return tensor


MODES = {
    "ring": (_all_heads, _own_tokens),
    "ulysses": (_own_heads, _all_tokens),
    "whole": (_unchanged, _unchanged),
}  # before and after attention


def _window_mask(length: int, window: Optional[int]) -> Optional[torch.Tensor]:
    """Return the mask of transformers for a sliding window, (1, 1, length, length). It has none for a shorter sample."""
    if window is None or length < window:
        return None
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return ((distance >= 0) & (distance < window))[None, None]

"""Attention of sequences that are split over ranks: register ring or Ulysses attention, and check that a model fits."""

import torch.distributed as dist
from transformers import AttentionInterface

from trainer.models.attention.attention_call import read_call
from trainer.models.attention.ring import ring_attention
from trainer.models.attention.ulysses import ulysses_attention
from trainer.models.attention.varlen import validate_attention_layers, validate_registered_attention


def register_ring_attention(group: dist.ProcessGroup, mode: str, packed: bool = False) -> str:
    """Register attention over `group` with transformers. Return its name, for use as `attn_implementation`.

    Mode "ring" passes keys and values around, for any number of heads. Mode "ulysses" exchanges heads for tokens. Mode
    "ring_package" is the ring of ring-flash-attn; transformers would load a kernel for a name with "flash". All map zigzag shards, query (rows, heads, tokens / sp,
    head_dim), to out (rows, tokens / sp, heads, head_dim). A model call has `cu_seqlens` of the whole row if documents are `packed`. It never has an attention mask.
    """
    if mode == "ring_package":
        from trainer.models.attention.ring_package import package_attention as attention
    else:
        attention = {"ring": ring_attention, "ulysses": ulysses_attention}[mode]

    def forward(module, query, key, value, attention_mask=None, **kwargs):
        call = read_call(module, query, attention_mask, kwargs, "--ring_attn_size", "1", packed)
        bounds = call.bounds(query.shape[2] * group.size())
        return attention(call.query, key, value, bounds, call.window, call.scale, group, call.softcap, call.sinks), None

    AttentionInterface.register(mode, forward)
    return mode


def validate_split_model(config) -> None:
    """Raise UserError for a transformers config whose layers would silently compute wrong results from a shard."""
    validate_attention_layers(config, "--ring_attn_size", "1")
    validate_registered_attention(config, "--ring_attn_size", "1")

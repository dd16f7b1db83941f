"""Ring attention of the package ring-flash-attn, over the kernels of flash-attn 2, as an alternative to ring.py.

Rows of one document use its zigzag ring, which cuts a row as `sequence_split` does. Packed rows use its "llama3"
attention (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2): each rank gathers keys and values, a KV
head at a time. That one needs consecutive tokens on each rank, so tokens are exchanged before and after.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist

from trainer.datasets.batches.global_batches import copied
from trainer.errors import UserError
from trainer.metrics import layer_configs
from trainer.models.attention.flash import MAX_HEAD_DIM, RING_FLAG, RING_PACKAGE
from trainer.models.attention.kernels import unit_stride
from trainer.models.attention.varlen import MODELS_WITH_SINKS

FLAG, NAME, ALLOWED = RING_FLAG, RING_PACKAGE, "native"


@functools.cache
def _package(module: str):
    """Import a module of the package without the package's __init__, which needs transformers 4."""
    if NAME not in sys.modules:
        package = types.ModuleType(NAME)
        package.__path__ = importlib.util.find_spec(NAME).submodule_search_locations
        sys.modules[NAME] = package
    return importlib.import_module(f"{NAME}.{module}")


def validate_model(config) -> None:
    """Raise UserError for a transformers config with attention that the package does not have."""
    for layer in layer_configs(config.get_text_config()):
        if not hasattr(layer, "num_attention_heads"):  # Mamba
            continue
        kinds = getattr(layer, "layer_types", None)
        slides = "sliding_attention" in kinds if kinds else getattr(layer, "use_sliding_window", True)
        window = getattr(layer, "sliding_window", None) if slides else None
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        query_dim = getattr(layer, "qk_head_dim", None) or head_dim
        has_sinks = layer.model_type in MODELS_WITH_SINKS
        _refuse(config.model_type, window, getattr(layer, "attn_logit_softcapping", None), has_sinks)
        _refuse_heads(config.model_type, query_dim, getattr(layer, "v_head_dim", None) or query_dim)


def _refuse(model: str, window: Optional[int], softcap: Optional[float], has_sinks: bool = False) -> None:
    for what, found in (("a sliding window", window), ("a soft cap", softcap), ("attention sinks", has_sinks or None)):
        if found is not None:
            raise UserError(FLAG, f"{NAME} with {what}, which {model} has", ALLOWED)


def _refuse_heads(model: str, query_dim: int, value_dim: int) -> None:
    if query_dim != value_dim or query_dim > MAX_HEAD_DIM or query_dim % 8:
        found = f"{NAME} with head_dim {query_dim} and {value_dim} of keys and values, which {model} has"
        raise UserError(FLAG, f"{found}; it takes one multiple of 8, up to {MAX_HEAD_DIM}", ALLOWED)


def package_attention(
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
    """Compute attention over the ranks of `group`, as trainer.models.attention.ring.ring_attention specifies.

    Raises UserError for a window, a soft cap, sinks, and heads that the package does not have.
    """
    _refuse("the model", window, softcap, sinks is not None)
    _refuse_heads("the model", query.shape[-1], value.shape[-1])
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]  # (rows, tokens / sp, heads, head_dim)
    options = {
        "softmax_scale": scale, "causal": True, "deterministic": torch.are_deterministic_algorithms_enabled(),
        "group": group,
    }  # fmt: skip
    if len(bounds) == 2:
        ring = _package("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
        return ring(*(unit_stride(tensor) for tensor in tensors), **options)
    gathering = _package("llama3_flash_attn_varlen")
    rank, size = group.rank(), group.size()
    ends = torch.tensor(bounds, dtype=torch.int32)  # in host memory: the package reads its numbers
    *ends, longest_query, longest_key, keys = gathering.llama3_flash_attn_prepare_cu_seqlens(ends, True, rank, size)
    ends = [copied(part, query.device) for part in ends]
    outputs = []
    for row in zip(*(_Exchange.apply(tensor, group, True) for tensor in tensors)):
        outputs.append(
            gathering.llama3_flash_attn_varlen_func(
                *row, *ends, int(longest_query), int(longest_key), heads_k_stride=1, local_k_slice=keys, **options
            )
        )
    return _Exchange.apply(torch.stack(outputs), group, False)


class _Exchange(torch.autograd.Function):
    """Zigzag shards (rows, tokens / sp, heads, head_dim) -> consecutive tokens on each rank, or back. Gradients return."""

    @staticmethod
    def forward(ctx, tensor, group, to_consecutive):
        ctx.group, ctx.to_consecutive = group, to_consecutive
        size = group.size()
        zigzag = [(rank, 2 * size - 1 - rank) for rank in range(size)]
        consecutive = [(2 * rank, 2 * rank + 1) for rank in range(size)]
        before, after = (zigzag, consecutive) if to_consecutive else (consecutive, zigzag)
        return _reordered(tensor, before, after, group)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.group, not ctx.to_consecutive), None, None


def _reordered(tensor: torch.Tensor, before: list, after: list, group: dist.ProcessGroup) -> torch.Tensor:
    """Send chunks so that this rank, with chunks `before[rank]` of the row, gets `after[rank]`. Both are (sp, 2)."""
    rank, size = group.rank(), group.size()
    owner = {chunk: place for place, chunks in enumerate(after) for chunk in chunks}
    mine = sorted(range(2), key=lambda place: owner[before[rank][place]])  # in the order of the receivers
    halves = tensor.chunk(2, dim=1)
    sent = torch.stack([halves[place] for place in mine])
    arriving = sorted(
        (sender, owner[before[sender][place]], place, before[sender][place])
        for sender in range(size) for place in range(2) if owner[before[sender][place]] == rank
    )  # fmt: skip
    received = torch.empty_like(sent)
    send_counts = [sum(owner[chunk] == receiver for chunk in before[rank]) for receiver in range(size)]
    receive_counts = [sum(sender == entry[0] for entry in arriving) for sender in range(size)]
    dist.all_to_all_single(received, sent, receive_counts, send_counts, group=group)
    chunks = [entry[3] for entry in arriving]
    return torch.cat([received[chunks.index(chunk)] for chunk in after[rank]], dim=1)

"""What one call of an attention function needs: documents, window, chunks, soft cap and sinks.

transformers passes some of them as arguments of the call. The rest is in the module's config, in the mask that a padded
run would build, or in the arguments of the model call.
"""

import itertools
import math
from typing import NamedTuple, Optional

import torch
from torch.distributed.tensor import DTensor, Shard

from trainer.datasets.batches.packing import HostBounds
from trainer.errors import UserError
from trainer.models.layers.model_call import current_call

# options of some models that attention here does not have
UNSUPPORTED = ("position_bias", "indices", "block_indices")
# their mask cuts "chunked_attention" layers into chunks of attention_chunk_size tokens
CHUNKED_MODELS = {"llama4_text"}
# every layer has the config's window, and only the mask shows it
WINDOWS_IN_MASKS = {"phimoe"}


class AttentionCall(NamedTuple):
    """The inputs of one attention call, without keys and values."""

    query: torch.Tensor  # (rows, heads, tokens, head_dim)
    cu_seqlens: Optional[torch.Tensor]  # None for rows of one document
    cu_seqlens_host: Optional[HostBounds]
    max_length: Optional[int]
    window: Optional[int]  # a query sees keys at distance 0 <= q - k < window
    chunk: Optional[int]  # a query sees keys of its own chunk. Chunks are counted from the start of the document.
    scale: float
    softcap: Optional[float]  # scores become softcap * tanh(scores / softcap)
    sinks: Optional[torch.Tensor]  # (heads,) one more score per head in the softmax, whose value is 0

    def bounds(self, num_tokens: int) -> list[int]:
        """Return where each document, or chunk of one, begins in a row of `num_tokens`, and where the last one ends."""
        bounds = [0, num_tokens] if self.cu_seqlens is None else document_bounds(self.cu_seqlens_host)
        return bounds if self.chunk is None else chunk_bounds(bounds, self.chunk)


def read_call(module, query, attention_mask, kwargs: dict, flag: str, allowed: str, packed: bool) -> AttentionCall:
    """Read the arguments of an attention function that transformers calls for the layer `module`.

    `query` is (rows, heads, tokens, head_dim). `kwargs` are the other arguments of the call. `packed`: a row holds
    documents.

    Raises:
        UserError: this attention cannot serve the call. The error names `flag` and what is `allowed`.
    """
    config = getattr(module, "config", None)
    name = getattr(config, "model_type", type(module).__name__)
    source = kwargs if kwargs.get("cu_seqlens") is not None else current_call()
    documents = [source.get(key) for key in ("cu_seqlens", "cu_seqlens_host", "max_length_q")]
    if packed and documents[0] is None:
        raise UserError("--packing_samples", f"{name} does not pass cu_seqlens to its attention", "leave it out")
    window = kwargs.get("sliding_window")
    if window is None and name in WINDOWS_IN_MASKS:
        window = config.sliding_window
    _validate(name, module, config, window, {"attention_mask": attention_mask, **kwargs}, flag, allowed)
    chunk = None
    if name in CHUNKED_MODELS and config.layer_types[module.layer_idx] == "chunked_attention":
        chunk = config.attention_chunk_size
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = _tuned_by_position(module, query, flag)
    scale, sinks = kwargs.get("scaling") or query.shape[-1] ** -0.5, kwargs.get("s_aux")
    if isinstance(sinks, DTensor):  # sharded over tp: this rank needs the sinks of its heads
        sinks = sinks.redistribute(placements=[Shard(0)]).to_local()
    return AttentionCall(query, *documents, window, chunk, scale, kwargs.get("softcap"), sinks)


@torch.compiler.disable  # otherwise every new list of bounds would be compiled again
def document_bounds(cu_seqlens_host: HostBounds) -> list[int]:
    """Return where each document of a packed row begins, and where the last one ends."""
    return cu_seqlens_host.tolist()


def chunk_bounds(bounds: list[int], chunk: int) -> list[int]:
    """Cut documents into chunks: bounds 0, 5, 7 in chunks of 2 give 0, 2, 4, 5, 7."""
    starts = [start for document in itertools.pairwise(bounds) for start in range(*document, chunk)]
    return [*starts, bounds[-1]]


def _validate(name: str, module, config, window: Optional[int], given: dict, flag: str, allowed: str) -> None:
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True) is not False
    # a window as wide as the longest text of the model cuts nothing
    has_window = has_window and config.sliding_window < getattr(config, "max_position_embeddings", math.inf)
    if window is None and has_window and not getattr(config, "layer_types", None):
        raise UserError(flag, f"{name} does not pass its sliding window to its attention", allowed)
    for what in ("attention_mask", *UNSUPPORTED):
        if given.get(what) is not None:
            raise UserError(flag, f"{name} has attention with {what}", allowed)
    if given.get("dropout"):
        raise UserError(flag, f"{name} has attention with dropout", allowed)
    is_causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(flag, f"{name} has attention that is not causal", allowed)


def _tuned_by_position(module, query: torch.Tensor, flag: str) -> torch.Tensor:
    """Return the query of a Llama 4 layer without rotary embedding, tuned by positions in the document.

    Such a layer multiplies the query by a factor that grows with the position (Nakanishi 2025, Scalable-Softmax). It
    counts positions from the first token that it sees, which is wrong in packed rows and in parts of a row.
    """
    positions = current_call().get("position_ids")
    if positions is None:
        raise UserError(flag, "attn_temperature_tuning without position_ids", "another model")
    in_row = torch.arange(query.shape[2], device=query.device)[None]
    factors, wrong = (
        torch.log1p(((place.float() + 1.0) / module.floor_scale).floor()) * module.attn_scale + 1.0
        for place in (positions, in_row)
    )
    return (query * (factors / wrong)[:, None, :, None]).to(query.dtype)

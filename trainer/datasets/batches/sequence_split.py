"""Shard a micro-batch over sequence-parallel ranks in zigzag order.

A row of T tokens is cut into 2 * sp_size equal chunks. Rank r gets chunks r and 2 * sp_size - 1 - r.
Under a causal mask, early tokens see few keys and late tokens see many. One early and one late chunk give every rank
the same work (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2).
"""

import functools

import torch
import torch.nn.functional as F

from trainer.datasets.batches.packing import IGNORE


def split_micro_batch(batch: dict, sp_rank: int, sp_size: int) -> dict:
    """Return this rank's shard of a collated micro-batch whose labels are already shifted.

    A tensor is sharded if its shape begins with the (rows, tokens) of `input_ids`. It is padded at its end to a
    multiple of 2 * sp_size tokens, then cut to (rows, tokens / sp_size). The padding repeats the last token of
    input_ids: the embedding of token 0 may be zero, and Gemma 3n would divide by it. It is IGNORE for labels, a count
    from 0 for positions, and 0 otherwise. Entries that are not per token do not change. `cu_seqlens` still describes the whole
    row, because every rank needs it; the padding becomes its last document. A micro-batch within the micro-batch is
    sharded separately. Every rank keeps all pixels of `images`.

    Two ranks, documents of 5 and 2 tokens, padded from 7 to 8 and cut into chunks of 2:

        input_ids   [10 11 | 12 13 | 14 20 | 21 21]    cu_seqlens [0, 5, 7, 8]
        rank 0      [10 11   21 21]                     chunks 0 and 3
        rank 1      [12 13   14 20]                     chunks 1 and 2

    Raises: ValueError if a row is padded on its left.
    """
    if sp_size == 1:
        return batch
    rows, num_tokens = batch["input_ids"].shape
    padding = -num_tokens % (2 * sp_size)
    split = {**batch}
    _check_right_padding(split.get("attention_mask"))
    if "cu_seqlens" in batch and padding:
        for name in ("cu_seqlens", "cu_seqlens_host"):
            split[name] = F.pad(batch[name], (0, 1), value=num_tokens + padding)
        split["max_length"] = max(batch["max_length"], padding)
    for name, tensor in split.items():
        if isinstance(tensor, dict):
            part = functools.partial(_split_images, padding=padding) if name == "images" else split_micro_batch
            split[name] = part(tensor, sp_rank=sp_rank, sp_size=sp_size)
        elif isinstance(tensor, torch.Tensor) and tensor.shape[:2] == (rows, num_tokens):
            split[name] = zigzag_shard(_padded(name, tensor, padding), sp_rank, sp_size)
    return split


def _split_images(images: dict, *, padding: int, sp_rank: int, sp_size: int) -> dict:
    """Shard the tensors per token (..., tokens). The padding is not an image, and has position 0."""
    fillers = {"position_ids": 0, "mm_token_type_ids": 0, "token_type_ids": 0, "image_places": -1}
    padded = {name: F.pad(images[name], (0, padding), value=fillers[name]) for name in fillers if name in images}
    return images | {name: zigzag_shard(tensor, sp_rank, sp_size, tensor.ndim - 1) for name, tensor in padded.items()}


def zigzag_shard(tensor: torch.Tensor, sp_rank: int, sp_size: int, dim: int = 1) -> torch.Tensor:
    """Join chunks sp_rank and 2 * sp_size - 1 - sp_rank of `dim`. Its size must be a multiple of 2 * sp_size.

    Of [10 11 12 13] on two ranks, rank 0 gets [10 13] and rank 1 gets [11 12].
    """
    chunks = tensor.chunk(2 * sp_size, dim)
    return torch.cat([chunks[sp_rank], chunks[2 * sp_size - 1 - sp_rank]], dim)


def zigzag_order(tensor: torch.Tensor, sp_size: int, dim: int = 1) -> torch.Tensor:
    """Permute `dim` from token order to the shards of rank 0, 1, ...: chunks 0 1 2 3 become 0 3 1 2."""
    return torch.cat([zigzag_shard(tensor, rank, sp_size, dim) for rank in range(sp_size)], dim)


def natural_order(tensor: torch.Tensor, sp_size: int, dim: int = 1) -> torch.Tensor:
    """Undo `zigzag_order`: put the shards of rank 0, 1, ... back in token order.

    The first halves of all shards come in rank order, then the second halves in reverse: 0 3 1 2 becomes 0 1 2 3.
    """
    chunks = tensor.chunk(2 * sp_size, dim)
    return torch.cat([*chunks[0::2], *chunks[1::2][::-1]], dim)


def _padded(name: str, tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """Pad to (rows, tokens + padding, ...). The padding's positions start at 0, so none exceeds the model's limit."""
    filler = tensor.new_full((tensor.shape[0], padding, *tensor.shape[2:]), IGNORE if name == "labels" else 0)
    if name == "input_ids":
        filler = filler + tensor[:, -1:]
    if name == "position_ids":
        filler = filler + torch.arange(padding, device=tensor.device)
    return torch.cat([tensor, filler], dim=1)


def _check_right_padding(attention_mask) -> None:
    if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
        raise ValueError("only batches that are padded on the right can be split over ranks")

"""Make micro-batches of token samples: padded rows, or documents packed end to end into one row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

IGNORE = -100  # the label of a position without loss: torch.nn.functional.cross_entropy's default ignore_index


def shifted_labels(input_ids: Sequence[int], loss_mask: Sequence[int]) -> list[int]:
    """labels[t] is token t + 1 if that token is a loss token, else IGNORE.

    Ids [5, 6, 7] with mask [0, 0, 1] give [-100, 7, -100]. The shift happens before any padding, packing or slicing
    over sequence-parallel ranks. So no later cut can lose a target.
    """
    return [token if mask else IGNORE for token, mask in zip(input_ids[1:], loss_mask[1:])] + [IGNORE]


def collate_padded(samples: list[dict], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right: input_ids, attention_mask, position_ids and shifted labels, each (rows, longest).

    Samples have input_ids and loss_mask. An empty list gives one pad token without target.
    """
    samples = samples or [{"input_ids": [pad_token_id], "loss_mask": [0]}]
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return {
        "input_ids": padded([list(sample["input_ids"]) for sample in samples], pad_token_id),
        "attention_mask": padded([[1] * len(sample["input_ids"]) for sample in samples], 0),
        "position_ids": torch.arange(longest).repeat(len(samples), 1),
        "labels": padded([shifted_labels(sample["input_ids"], sample["loss_mask"]) for sample in samples], IGNORE),
    }


def collate_packed(samples: list[dict], pad_token_id: int) -> dict:
    """Put documents end to end in one row: input_ids, position_ids and shifted labels, each (1, tokens).

    Positions restart in each document. cu_seqlens (documents + 1,) has the document bounds. Documents of 3 and 2 tokens
    give cu_seqlens [0, 3, 5] and position_ids [[0, 1, 2, 0, 1]]. The loader keeps cu_seqlens_host in host memory, and
    max_length is an int, so reading them needs no wait for a GPU. An empty list gives one pad token without target.
    """
    samples = samples or [{"input_ids": [pad_token_id], "loss_mask": [0]}]
    lengths = [len(sample["input_ids"]) for sample in samples]
    labels = [label for sample in samples for label in shifted_labels(sample["input_ids"], sample["loss_mask"])]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.tensor([[token for sample in samples for token in sample["input_ids"]]]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": torch.tensor([labels]),
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_host": cu_seqlens,
        "max_length": max(lengths),
    }


@dataclass(frozen=True)
class HostBounds:
    """Document bounds in host memory, for a model call. No tensor: FSDP2 would move it to the GPU, and reading it would wait."""

    bounds: list[int]  # equal bounds are equal objects: DeepSpeed compares the arguments of tensor-parallel ranks

    def tolist(self) -> list[int]:
        return self.bounds


def host_bounds(cu_seqlens_host: torch.Tensor) -> HostBounds:
    """The bounds that the loader keeps in host memory. Reading them waits for nothing."""
    return HostBounds(cu_seqlens_host.tolist())


def model_inputs(batch: dict) -> dict:
    """The arguments that a padded or packed micro-batch gives to a model call.

    There is no attention_mask, because kernels are faster without one. Rows are padded on the right, and under causal
    attention no real token sees that padding. `images` are those of image_batches, `more_inputs` those of shared_prompts.
    """
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    if "cu_seqlens" in batch:
        inputs.update(
            cu_seqlens=batch["cu_seqlens"], cu_seqlens_host=host_bounds(batch["cu_seqlens_host"]),  # for our attention functions
            cu_seq_lens_q=batch["cu_seqlens"], cu_seq_lens_k=batch["cu_seqlens"],  # read by transformers' flash-attn
            max_length_q=batch["max_length"], max_length_k=batch["max_length"],
        )  # fmt: skip
    return inputs | batch.get("images", {}) | batch.get("more_inputs", {})

"""Log-probabilities per token and sums per sequence, over split vocabularies (tp) and split sequences (sp)."""

from typing import Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from trainer.datasets.packing import IGNORE
from trainer.models.actor import model_inputs
from trainer.models.linear_loss import rows_of_a_chunk, token_nll
from trainer.models.vocab_parallel import vocab_parallel_entropy, vocab_parallel_nll


class _SumOverGroup(torch.autograd.Function):
    """Sum over `group`, of which every rank then has the result. Backward sums too: each rank's loss may use the result."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def label_log_probs(model, micro_batch: dict) -> torch.Tensor:
    """log p(labels[t]) at every position by one forward pass, fp32, 0 where the label is IGNORE: (rows, tokens)."""
    values, are_losses = token_nll(model, model_inputs(micro_batch), micro_batch["labels"])
    return -values if are_losses else token_log_probs(values, micro_batch["labels"])


def token_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: Optional[int] = None, temperature: float = 1.0
) -> torch.Tensor:
    """log p(labels[t]) at every position, fp32, 0 where the label is IGNORE: (rows, tokens).

    logits (rows, tokens, vocab) of any float dtype, or a DTensor of them sharded over the vocabulary (all-reduces over
    tp), are divided by `temperature`. They are upcast `chunk_tokens` at a time, by default `rows_of_a_chunk` of the
    whole vocabulary, so that ranks with parts of different sizes reduce the same chunks, and again in the backward pass: fp32
    logits of a large batch never exist. A batch that is a single chunk is upcast once.
    """
    nll, chunk_tokens = _whole_nll, chunk_tokens or rows_of_a_chunk(logits.shape[-1])
    if isinstance(logits, DTensor):
        _, offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
        group = logits.device_mesh.get_group()
        logits = logits.to_local()

        def nll(kept_logits, targets):
            return vocab_parallel_nll(kept_logits, targets, offset[-1], group)

    return _by_chunks(lambda kept, targets: -nll(kept / temperature, targets), logits, labels, chunk_tokens)


def token_entropies(
    logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: Optional[int] = None, temperature: float = 1.0
) -> torch.Tensor:
    """-sum p log p over the vocabulary at every position, 0 where the label is IGNORE; otherwise like `token_log_probs`."""
    entropy, chunk_tokens = _whole_entropy, chunk_tokens or rows_of_a_chunk(logits.shape[-1])
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group()
        logits = logits.to_local()

        def entropy(kept_logits):
            return vocab_parallel_entropy(kept_logits, group)

    return _by_chunks(lambda kept, _targets: entropy(kept / temperature), logits, labels, chunk_tokens)


def _by_chunks(function, logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """`function(fp32 logits, labels)` of the tokens that have a label: (rows, tokens)."""
    if labels.numel() <= chunk_tokens:
        return _of_chunk(logits.flatten(0, -2), labels.flatten(), function).view(labels.shape)
    # split, not slices: its backward writes one gradient of the logits instead of one per chunk
    chunks = zip(logits.flatten(0, -2).split(chunk_tokens), labels.flatten().split(chunk_tokens))
    parts = [checkpoint(_of_chunk, *chunk, function, use_reentrant=False) for chunk in chunks]
    return torch.cat(parts).view(labels.shape)


def _of_chunk(logits: torch.Tensor, labels: torch.Tensor, function) -> torch.Tensor:
    keep = (labels != IGNORE).nonzero().squeeze(1)
    values = function(logits[keep].float(), labels[keep])
    return values.new_zeros(labels.shape).index_put((keep,), values)


def _whole_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def _whole_entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def sum_by_sequence(
    values: torch.Tensor, sequence_ids: torch.Tensor, num_sequences: int, sp_group: Optional[dist.ProcessGroup]
) -> torch.Tensor:
    """(num_sequences, ...) fp64 sums of `values` (rows, tokens, ...) by `sequence_ids` (rows, tokens); all-reduced over sp.

    fp64, since a preference looks at small differences of large sums. Every sp rank gets every sum; the loss made of
    them has to be counted on one of them, see `counts_here`. Values [1, 2, 4] of sequences [0, 1, 0] give [5, 2].
    """
    # a micro-batch without a sequence still has a token, whose id is 0; its sum is cut off
    sums = torch.zeros(max(num_sequences, 1), *values.shape[2:], dtype=torch.float64, device=values.device)
    sums = sums.index_add(0, sequence_ids.flatten(), values.flatten(0, 1).double())
    if sp_group is not None and sp_group.size() > 1:
        sums = _SumOverGroup.apply(sums, sp_group)
    return sums[:num_sequences]


def counts_here(sp_group: Optional[dist.ProcessGroup]) -> int:
    """1 on the one rank of the sp group whose loss, count and metrics of whole sequences are taken; 0 on the others."""
    return int(sp_group is None or sp_group.rank() == 0)

"""Losses of tokens: log-probs of labels and entropies, by one of four routes. SFT, DPO and policy losses use them.

1. Few logits: a plain cross-entropy in fp32.
2. Many logits: they are upcast to fp32 in chunks, and again in the backward pass.
3. Many logits that do not exist yet: `linear_loss` makes them from hidden states, chunk by chunk.
4. Logits sharded over tp: `vocab_parallel` works on each rank's part of the vocabulary.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from trainer.datasets.batches.packing import IGNORE, model_inputs
from trainer.models.losses.linear_loss import token_nll
from trainer.models.losses.vocab_parallel import vocab_parallel_entropy, vocab_parallel_nll

# bytes of fp32 logits that exist at a time; a micro-batch that fits takes the plain route, which is faster
CHUNK_BYTES = 2**27
GPU_CHUNK_BYTES = 2**30  # a small product leaves most of a GPU idle


def tokens_of_a_chunk(vocab_size: int, device: torch.device) -> int:
    """Return of how many tokens fp32 logits over a whole vocabulary are computed at a time. It is at least one."""
    return max((GPU_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES) // (4 * vocab_size), 1)


def causal_lm_logits(model, batch: dict) -> torch.Tensor:
    """Return the logits (rows, tokens, vocab) of a padded or packed micro-batch."""
    return model(**model_inputs(batch)).logits


def label_log_probs(model, micro_batch: dict) -> torch.Tensor:
    """Run one forward pass. Return log p(labels[t]) at every position: (rows, tokens) fp32, 0 where IGNORE.

    `labels` (rows, tokens) are shifted already: labels[t] is token t + 1, see `packing.shifted_labels`. With --exact,
    `rounded` of the micro-batch is a function for them, from `exact_sums.with_exact_sums`; they are fp64 then.
    """
    log_probs = _label_log_probs(model, micro_batch)
    return micro_batch["rounded"](log_probs) if "rounded" in micro_batch else log_probs


def _label_log_probs(model, micro_batch: dict) -> torch.Tensor:
    labels, head = micro_batch["labels"], model.get_output_embeddings()
    kept = places_of_labels(micro_batch)
    # an adapter on the head, a vocabulary that DeepSpeed splits over tp, or a product of its own (--exact)
    if not isinstance(head, torch.nn.Linear) or "forward" in vars(head):
        return token_log_probs(causal_lm_logits(model, micro_batch), labels, kept=kept)
    chunk_rows = tokens_of_a_chunk(head.out_features, labels.device)
    if len(kept) <= chunk_rows:
        return token_log_probs(causal_lm_logits(model, micro_batch), labels, chunk_tokens=labels.numel(), kept=kept)
    values, are_losses = token_nll(model, model_inputs(micro_batch), labels, kept, chunk_rows)
    return -values if are_losses else token_log_probs(values, labels, kept=kept)


def token_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: Optional[int] = None, temperature: float = 1.0, kept=None
) -> torch.Tensor:
    """Return log p(labels[t]) at every position: (rows, tokens) fp32, 0 where the label is IGNORE.

    `logits` (rows, tokens, vocab) of any float dtype are divided by `temperature`. A DTensor is sharded over the
    vocabulary (all-reduces over tp). Logits are upcast to fp32 `chunk_tokens` at a time, and again in backward. So the
    fp32 logits of a large batch never exist. A batch of a single chunk is upcast once. The default chunk depends on the
    whole vocabulary: ranks with parts of different sizes then reduce the same chunks. `kept` (n,) are the places of the
    labels in all rows, if they are known.
    """
    nll, chunk_tokens = _whole_nll, chunk_tokens or tokens_of_a_chunk(logits.shape[-1], logits.device)
    if isinstance(logits, DTensor):
        _, offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
        group = logits.device_mesh.get_group()
        logits = logits.to_local()

        def nll(kept_logits, targets):
            return vocab_parallel_nll(kept_logits, targets, offset[-1], group)

    return _by_chunks(lambda found, targets: -nll(_at(temperature, found), targets), logits, labels, chunk_tokens, kept)


def token_entropies(
    logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: Optional[int] = None, temperature: float = 1.0, kept=None
) -> torch.Tensor:
    """Return -sum p log p over the vocabulary at every position, 0 where IGNORE; otherwise like `token_log_probs`."""
    entropy, chunk_tokens = _whole_entropy, chunk_tokens or tokens_of_a_chunk(logits.shape[-1], logits.device)
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group()
        logits = logits.to_local()

        def entropy(kept_logits):
            return vocab_parallel_entropy(kept_logits, group)

    return _by_chunks(lambda found, _targets: entropy(_at(temperature, found)), logits, labels, chunk_tokens, kept)


def log_probs_and_entropies(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, kept: torch.Tensor, entropy_has_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_log_probs` and `token_entropies` of a single chunk, in the same bits.

    One log-softmax serves both, unless the entropies have a gradient or the vocabulary is sharded.
    """
    if entropy_has_gradient or isinstance(logits, DTensor):
        options = {"chunk_tokens": labels.numel(), "temperature": temperature, "kept": kept}
        log_probs = token_log_probs(logits, labels, **options)
        with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
            return log_probs, token_entropies(logits, labels, **options)
    rows = _at(temperature, logits.flatten(0, -2)[kept].float()).log_softmax(-1)
    nll = F.nll_loss(rows, labels.flatten()[kept], reduction="none")
    with torch.no_grad():
        entropies = _entropy_of(rows)
    return tuple(_placed(values, labels.flatten(), kept).view(labels.shape) for values in (-nll, entropies))


def _at(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    """The logits divided by the temperature. A division by 1 would only copy them."""
    return logits if temperature == 1 else logits / temperature


def _by_chunks(function, logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, kept=None) -> torch.Tensor:
    """Return `function(fp32 logits, labels)` of the tokens with a label: (rows, tokens). The host waits once for a GPU."""
    if labels.numel() <= chunk_tokens:
        kept = places_of_labels({"labels": labels}) if kept is None else kept
        return _of_chunk(logits.flatten(0, -2), labels.flatten(), kept, function).view(labels.shape)
    # split, not slices: the backward of split writes one gradient of the logits instead of one per chunk
    labels_of_chunks = labels.flatten().split(chunk_tokens)
    masks = [chunk != IGNORE for chunk in labels_of_chunks]
    counts = torch.stack([mask.sum() for mask in masks]).tolist()
    places = [mask.nonzero_static(size=count).squeeze(1) for mask, count in zip(masks, counts)]
    chunks = zip(logits.flatten(0, -2).split(chunk_tokens), labels_of_chunks, places)
    parts = [checkpoint(_of_chunk, *chunk, function, use_reentrant=False) for chunk in chunks]
    return torch.cat(parts).view(labels.shape)


def places_of_labels(micro_batch: dict) -> torch.Tensor:
    """Return the places of the labels in all rows, (n,). If the loader has not found them, the host waits for the GPU."""
    if "kept" in micro_batch:
        return micro_batch["kept"]
    return (micro_batch["labels"] != IGNORE).flatten().nonzero().squeeze(1)


def _of_chunk(logits: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor, function) -> torch.Tensor:
    return _placed(function(logits[kept].float(), labels[kept]), labels, kept)


def _placed(values: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(labels.shape).index_put((kept,), values)


def _whole_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def _whole_entropy(logits: torch.Tensor) -> torch.Tensor:
    return _entropy_of(logits.log_softmax(-1))


def _entropy_of(log_probabilities: torch.Tensor) -> torch.Tensor:
    return -(log_probabilities.exp() * log_probabilities).sum(-1)

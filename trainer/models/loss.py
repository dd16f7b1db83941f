"""Losses: pure functions of tensors. Each returns (sum, count); only a strategy divides, by the global count."""

import torch
import torch.nn.functional as F

from trainer.datasets.packing import IGNORE


def token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over loss tokens of -log p(label), and their number.

    logits: (rows, tokens, vocab), any float dtype, upcast to fp32. labels: (rows, tokens), already shifted: labels[t] is
    the token that follows position t, or IGNORE. The denominator of the mean is the count over the global batch.
    """
    flat_labels = labels.flatten()
    keep = (flat_labels != IGNORE).nonzero().squeeze(1)  # upcasting only loss tokens saves memory on long prompts
    kept_logits = logits.flatten(0, -2)[keep].float()  # (loss tokens, vocab)
    return F.cross_entropy(kept_logits, flat_labels[keep], reduction="sum"), keep.new_tensor(keep.numel())

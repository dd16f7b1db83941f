"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the global batch."""

from collections.abc import Callable
from typing import Optional

import torch

from trainer.datasets.batches.packing import IGNORE
from trainer.models.losses.token_losses import label_log_probs


def sft_loss(
    model, micro_batch: dict, *, note_log_probs: Optional[Callable[[torch.Tensor], None]] = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of -log p(label) over the loss tokens, number of loss tokens) of a micro-batch.

    `note_log_probs` gets log p(label) of every token, (rows, tokens), 0 where there is no label.
    """
    log_probs = label_log_probs(model, micro_batch)
    if note_log_probs:
        note_log_probs(log_probs)
    return -log_probs.sum(), (micro_batch["labels"] != IGNORE).sum()

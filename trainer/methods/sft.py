"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the global batch."""

import torch

from trainer.datasets.batches.packing import IGNORE
from trainer.models.losses.token_losses import label_log_probs


def sft_loss(model, micro_batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of -log p(label) over the loss tokens, number of loss tokens) of a micro-batch."""
    return -label_log_probs(model, micro_batch).sum(), (micro_batch["labels"] != IGNORE).sum()

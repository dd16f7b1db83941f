"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the global batch."""

import torch

from trainer.models.actor import causal_lm_logits
from trainer.models.vocab_parallel import causal_lm_cross_entropy


def sft_loss(model, micro_batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of token losses, number of loss tokens) of a micro-batch."""
    return causal_lm_cross_entropy(causal_lm_logits(model, micro_batch), micro_batch["labels"])

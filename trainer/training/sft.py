"""Supervised fine-tuning: the mean cross-entropy over the loss tokens of the global batch."""

import torch
from torch.distributed.tensor import DTensor

from trainer.datasets.packing import IGNORE
from trainer.models.actor import model_inputs
from trainer.models.linear_loss import token_nll
from trainer.models.loss import token_cross_entropy


def sft_loss(model, micro_batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of token losses, number of loss tokens) of a micro-batch."""
    labels = micro_batch["labels"]
    values, are_losses = token_nll(model, model_inputs(micro_batch), labels)
    if are_losses:
        return values.sum(), (labels != IGNORE).sum()
    if isinstance(values, DTensor):  # over tp
        from trainer.models.vocab_parallel import sharded_cross_entropy

        return sharded_cross_entropy(values, labels)
    return token_cross_entropy(values, labels)

"""Knowledge distillation: the KL from the teacher's distribution to the model's, at every token with a loss."""

from collections.abc import Callable
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer.datasets.batches.packing import IGNORE
from trainer.models.losses.token_losses import causal_lm_logits, rows_of_a_chunk, token_log_probs


class _KLToModel(torch.autograd.Function):
    """KL(teacher || model) of each row of logits (rows, vocab). The gradient is p_model - p_teacher.

    With a `group`, each of its ranks has some columns (two all-reduces: of maxima, then of sums). Backward is local.
    """

    @staticmethod
    def forward(ctx, model: torch.Tensor, teacher: torch.Tensor, group: Optional[dist.ProcessGroup]) -> torch.Tensor:
        both = [model, teacher]
        maxima = torch.stack([x.amax(1) if x.shape[1] else x.new_full((len(x),), float("-inf")) for x in both])
        if group is not None:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        model, teacher = (x - maximum[:, None] for x, maximum in zip(both, maxima))
        weights = teacher.exp()
        sums = torch.stack([model.exp().sum(1), weights.sum(1), (weights * (teacher - model)).sum(1)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(model - sums[0].log()[:, None], weights / sums[1][:, None])
        return sums[2] / sums[1] - sums[1].log() + sums[0].log()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        log_probs, teacher = ctx.saved_tensors
        return (log_probs.exp() - teacher) * grad[:, None], None, None


def teacher_kl(model: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(teacher || model) at this temperature, at every position with a label: the sum over all of them, fp32.

    Logits (rows, tokens, vocab) are upcast to fp32 in chunks, and again in the backward pass. DTensors are sharded over the
    vocabulary (all-reduces over tp).
    """
    group, chunk_tokens = None, rows_of_a_chunk(model.shape[-1], model.device)
    if isinstance(model, DTensor):
        group = model.device_mesh.get_group()
        model, teacher = model.to_local(), teacher.to_local()

    def of_chunk(model: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = (labels != IGNORE).nonzero().squeeze(1)
        return _KLToModel.apply(model[kept].float() / temperature, teacher[kept].float() / temperature, group).sum()

    parts = [x.flatten(0, -2).split(chunk_tokens) for x in (model, teacher)]
    chunks = list(zip(*parts, labels.flatten().split(chunk_tokens)))
    if len(chunks) == 1:
        return of_chunk(*chunks[0])
    return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()


def make_teacher_loss(teacher, coef: float, temperature: float) -> Callable:
    """The loss function of `train_kd`: coef * T^2 * KL(teacher || model) - (1 - coef) * log p(label), per loss token.

    It is the loss of Hinton et al. 2015, section 2, at each token. `teacher` is a prepared frozen model.
    """

    def loss(model, micro_batch: dict):
        labels = micro_batch["labels"]
        logits = causal_lm_logits(model, micro_batch)
        with torch.no_grad():
            of_teacher = causal_lm_logits(teacher, micro_batch)
        nll = -token_log_probs(logits, labels).sum()
        kl = temperature**2 * teacher_kl(logits, of_teacher, labels, temperature)
        total = coef * kl + (1 - coef) * nll
        return total, (labels != IGNORE).sum(), {"teacher_kl": kl, "nll": nll}

    return loss

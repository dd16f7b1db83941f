"""Knowledge distillation: the distance of the model's distribution from its teacher's, at every token with a loss."""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from trainer.datasets.batches.packing import IGNORE
from trainer.methods.roles import mean_of_teachers
from trainer.metrics import MetricSum
from trainer.models.lora import fixed_model
from trainer.models.losses.distances import Distance, distances
from trainer.models.losses.token_losses import causal_lm_logits, token_log_probs, tokens_of_a_chunk


def teacher_distances(
    model: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, temperature: float, distance: Distance
) -> torch.Tensor:
    """The distance at this temperature at every position: (rows, tokens) fp32, 0 where the label is IGNORE.

    Logits (rows, tokens, vocab) are upcast to fp32 in chunks, and again in the backward pass. DTensors are sharded over the
    vocabulary (collectives over tp).
    """
    group, first, chunk_tokens = None, 0, tokens_of_a_chunk(model.shape[-1], model.device)
    if isinstance(model, DTensor):
        _, offset = compute_local_shape_and_global_offset(model.shape, model.device_mesh, model.placements)
        group, first = model.device_mesh.get_group(), offset[-1]
        model, teacher = model.to_local(), teacher.to_local()

    def of_chunk(model: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept = (labels != IGNORE).nonzero().squeeze(1)
        both = (x[kept].float() / temperature for x in (model, teacher))
        found = distances(*both, distance, first, group)
        return found.new_zeros(labels.shape).index_put((kept,), found)

    parts = (model.flatten(0, -2), teacher.flatten(0, -2), labels.flatten())
    chunks = list(zip(*(x.split(chunk_tokens) for x in parts)))
    if len(chunks) == 1:
        return of_chunk(*chunks[0]).view(labels.shape)
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).view(labels.shape)


def make_teacher_loss(
    teachers: Sequence[tuple[float, Callable]], coef: float, temperature: float, distance: Distance
) -> Callable:
    """The loss function of `train_kd`: coef * T^2 * distance(teacher, model) - (1 - coef) * log p(label), per loss token.

    With the forward KL, it is the loss of Hinton et al. 2015, section 2, at each token. `teachers` are pairs of a weight and
    a function from a micro-batch to logits: the distance is the weighted sum of their distances.
    """

    def loss(model, micro_batch: dict):
        labels = micro_batch["labels"]
        logits = causal_lm_logits(model, micro_batch)
        nll = -token_log_probs(logits, labels)
        found = []
        for weight, teacher in teachers:
            with torch.no_grad():
                of_teacher = teacher(micro_batch)
            found.append(weight * temperature**2 * teacher_distances(logits, of_teacher, labels, temperature, distance))
        of_teachers = sum(found[1:], found[0])
        values = (coef * of_teachers + (1 - coef) * nll, of_teachers, nll)
        total, *metrics = (x.sum() for x in map(micro_batch.get("rounded", torch.clone), values))
        return total, (labels != IGNORE).sum(), dict(zip(("teacher_loss", "nll"), metrics))

    return loss


def make_on_policy_loss(policy_loss: Callable, teachers: Sequence, temperature: float, distance: Distance) -> Callable:
    """The loss function of `train_ppo --kd_loss`: the distance(teacher, model) at each token that the model has sampled.

    It is the loss of Agarwal et al. 2024 (GKD), equation 2 with lambda 1, without a gradient through the sampling. The other
    metrics are those of `policy_loss`, which gives no gradient. A teacher that is None: the policy with its adapter off.
    Of several teachers, the distance is the mean of theirs, see `mean_of_teachers`.
    """

    def loss(model, micro_batch: dict):
        with torch.no_grad():
            _, count, metrics = policy_loss(model, micro_batch)
        logits = causal_lm_logits(model, micro_batch)
        found = []
        for teacher in teachers:
            with fixed_model(model, teacher) as fixed:
                of_teacher = causal_lm_logits(fixed, micro_batch)
            found.append(teacher_distances(logits, of_teacher, micro_batch["labels"], temperature, distance))
        total = (mean_of_teachers(found, micro_batch) * micro_batch["loss_weights"]).sum()
        return total, count, {**metrics, "policy_loss": MetricSum(total.detach())}

    return loss

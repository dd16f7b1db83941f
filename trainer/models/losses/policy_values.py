"""Log-probs and entropies of a policy without the logits of a whole micro-batch: (tokens, vocabulary) never exists.

As in `linear_loss`, the head of the model returns results instead of logits. Here they are two numbers per token. The
head may also be sharded over tp, by FSDP2's or by DeepSpeed's plan. Then each rank has its columns of a chunk's logits.
"""

import functools
from collections.abc import Callable
from typing import Optional

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Shard

from trainer.datasets.batches.packing import model_inputs
from trainer.distributed.gradient_collectives import SumGradients
from trainer.distributed.sharded_tensors import sharded_logits
from trainer.models.losses.linear_loss import as_autocast, at_places, forward_replaced, head_is_last, row_slices
from trainer.models.losses.token_losses import (
    causal_lm_logits,
    log_probs_and_entropies,
    places_of_labels,
    token_entropies,
    token_log_probs,
    tokens_of_a_chunk,
)
from trainer.models.losses.truncation import within_sets


def policy_values(
    model, micro_batch: dict, temperature: float, entropy_has_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the labels and entropies, both (rows, tokens) fp32, 0 without a label.

    They belong to the distribution that the rollout sampled from: at this temperature, and within `kept_sets`, see
    `truncation.within_sets`. Few labels take the plain route over all logits. So does a model that changes its logits
    after the head, or that has an adapter on it.
    """
    labels, head = micro_batch["labels"], model.get_output_embeddings()
    kept, in_one_chunk = places_of_labels(micro_batch), False
    sharded_logits = vars(head).get("sharded_logits")  # of a head that DeepSpeed has sharded over tp
    has_own_product = "forward" in vars(head)  # with --exact
    if (isinstance(head, torch.nn.Linear) or sharded_logits) and not has_own_product:
        chunk_rows = tokens_of_a_chunk(_vocab_size(head), labels.device)
        config = model.get_output_embeddings.__self__.config
        in_one_chunk = len(kept) <= chunk_rows
        if not in_one_chunk and head_is_last(type(config), config.to_json_string(False)):
            return _by_chunks(model, micro_batch, kept, chunk_rows, temperature, entropy_has_gradient)
    logits = causal_lm_logits(model, micro_batch)
    if "kept_sets" in micro_batch:
        logits = within_sets(logits, micro_batch["kept_sets"])
    if in_one_chunk:
        return log_probs_and_entropies(logits, labels, temperature, kept, entropy_has_gradient)
    log_probs = token_log_probs(logits, labels, temperature=temperature)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        return log_probs, token_entropies(logits, labels, temperature=temperature)


def _vocab_size(head: torch.nn.Module) -> int:
    """The number of rows of the whole head, also if this rank holds only a part of them."""
    if "sharded_logits" in vars(head):
        return head.vocab_size
    return head.weight.shape[0] if isinstance(head.weight, DTensor) else head.out_features


def _by_chunks(
    model, micro_batch: dict, kept: torch.Tensor, chunk_rows: int, temperature: float, entropy_has_gradient: bool
):
    labels = micro_batch["labels"]
    targets, sets = labels.flatten()[kept], micro_batch.get("kept_sets")
    if sets is not None:  # where the sets of each chunk begin; the host waits once for a GPU
        starts = [*torch.searchsorted(sets[0], kept[::chunk_rows].contiguous()).tolist(), sets.shape[1]]
    head = model.get_output_embeddings.__self__.get_output_embeddings()  # without the wrappers of DeepSpeed and peft

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden, weight, bias, as_logits, as_output = _local_head(head, hidden)

        def of_chunk(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            logits, here = as_logits(logits[None]), targets[None, rows]
            if sets is not None:
                number = rows.start // chunk_rows
                places, tokens = sets[:, starts[number] : starts[number + 1]]
                logits = within_sets(logits, torch.stack([torch.searchsorted(kept[rows], places), tokens]))
            every = torch.arange(here.numel(), device=here.device)  # each of these places has a label
            values = log_probs_and_entropies(logits, here, temperature, every, entropy_has_gradient)
            return torch.stack(values, -1)[0]  # (chunk, 2)

        hidden, weight, bias = as_autocast(hidden, weight, bias)
        values = _Chunks.apply(hidden.flatten(0, -2)[kept], weight, bias, of_chunk, chunk_rows)
        return as_output(at_places(values, kept, labels.shape))

    with forward_replaced(head, forward):
        output = model(**model_inputs(micro_batch)).logits
    output = output.to_local() if isinstance(output, DTensor) else output
    return output[..., 0], output[..., 1]


def _local_head(
    head, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], Callable, Callable]:
    """This rank's (hidden states, weight, bias) of a head, and two functions of local results.

    The first one makes logits, the second one the output of the head.
    """
    weight, bias = head.weight, head.bias
    if "sharded_logits" in vars(head):
        return SumGradients.apply(head.mp_group, hidden)[0], weight, bias, head.sharded_logits, lambda output: output
    if not isinstance(weight, DTensor):
        return hidden, weight, bias, lambda logits: logits, lambda output: output
    mesh = weight.device_mesh
    hidden = hidden.to_local(grad_placements=[Partial()])  # each rank has the gradient of its columns
    bias = None if bias is None else bias.to_local()
    return (
        hidden,
        weight.to_local(),
        bias,
        functools.partial(sharded_logits, weight.shape[0], mesh),
        lambda out: DTensor.from_local(out, mesh, [Shard(2)], run_check=False),
    )


class _Chunks(torch.autograd.Function):
    """`of_chunk(hidden @ weight.T + bias, rows)` by chunks of rows. Backward computes each chunk again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, of_chunk: Callable, chunk_rows: int):
        ctx.save_for_backward(hidden, weight, bias)
        ctx.of_chunk, ctx.chunk_rows = of_chunk, chunk_rows
        return torch.cat(
            [of_chunk(F.linear(hidden[rows], weight, bias), rows) for rows in row_slices(len(hidden), chunk_rows)]
        )

    @staticmethod
    def backward(ctx, grad):
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        # fp32: sums over chunks must not round to bf16 each time
        sums = [torch.zeros_like(t, dtype=torch.float32) if need else None for t, need in zip(tensors, needed)]
        for rows in row_slices(len(grad), ctx.chunk_rows):
            leaves = [None if tensor is None else tensor.detach() for tensor in (tensors[0][rows], *tensors[1:])]
            leaves = [leaf.requires_grad_() if need else leaf for leaf, need in zip(leaves, needed)]
            with torch.enable_grad():
                values = ctx.of_chunk(F.linear(*leaves), rows)
            wanted = [leaf for leaf, need in zip(leaves, needed) if need]
            found = iter(torch.autograd.grad(values, wanted, grad[rows]))
            if needed[0]:
                sums[0][rows] = next(found).float()
            for total, need in zip(sums[1:], needed[1:]):
                if need:
                    total += next(found)
            del values, wanted, found
        return *(None if t is None else t.to(of.dtype) for t, of in zip(sums, tensors)), None, None

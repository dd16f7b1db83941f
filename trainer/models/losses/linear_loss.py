"""Token losses from hidden states and head, without the logits of a whole micro-batch.

The head of a causal language model returns losses instead of logits. `token_nll` replaces the head's `forward` while
the model runs. FSDP and ZeRO-3 still gather the head's weight as they do for logits.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from trainer.models.attention.flash import on_gpu


class _LinearNLL(torch.autograd.Function):
    """-log softmax(hidden @ weight.T + bias)[target] of each row, by chunks of rows. Backward computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, chunk_rows: int):
        nll, lse = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        for rows in row_slices(len(hidden), chunk_rows):
            logits = F.linear(hidden[rows], weight, bias).float()  # (chunk, vocab)
            lse[rows] = logits.logsumexp(1)
            nll[rows] = lse[rows] - logits.gather(1, targets[rows, None]).squeeze(1)
            del logits  # otherwise the logits of two chunks would exist at once
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.chunk_rows = chunk_rows
        return nll

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]  # a frozen head gets no gradient memory
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        # fp32: sums over chunks must not round to bf16 each time
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        for rows in row_slices(len(hidden), ctx.chunk_rows):
            logits = F.linear(hidden[rows], weight, bias).float()
            probabilities = logits.sub_(lse[rows, None]).exp_()
            probabilities.scatter_add_(1, targets[rows, None], torch.full_like(lse[rows, None], -1.0))
            grad_logits = probabilities.mul_(grad[rows, None]).to(hidden.dtype)
            if for_hidden:
                grad_hidden[rows] = grad_logits @ weight
            if for_weight and weight.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            elif for_weight and on_gpu(grad_logits):  # sums in fp32 without a product in half precision between
                torch.addmm(grad_weight, grad_logits.T, hidden[rows], out_dtype=torch.float32, out=grad_weight)
            elif for_weight:
                grad_weight += grad_logits.T @ hidden[rows]
            if for_bias:
                grad_bias += grad_logits.float().sum(0)
            del logits, probabilities, grad_logits
        grad_weight = grad_weight.to(weight.dtype) if for_weight else None
        grad_bias = grad_bias.to(bias.dtype) if for_bias else None
        return grad_hidden, grad_weight, grad_bias, None, None


def row_slices(length: int, size: int) -> Iterator[slice]:
    """Slices of up to `size` rows: 5 rows by 2 are 0:2, 2:4, 4:6."""
    return (slice(start, start + size) for start in range(0, length, size))


def linear_nll(hidden, weight, bias, targets, chunk_rows: int) -> torch.Tensor:
    """Return -log p(target), (rows,) fp32, from hidden states (rows, width) and a head (vocab, width).

    Logits exist for `chunk_rows` rows at a time. This costs four matrix products instead of three.
    """
    return _LinearNLL.apply(*as_autocast(hidden, weight, bias), targets, chunk_rows)


def as_autocast(hidden, weight, bias) -> tuple:
    """Under autocast, convert the three inputs of a head to its dtype, as a Linear does. `bias` may be None."""
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def at_places(values: torch.Tensor, kept: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`values` (n, k) at the places `kept` (n,) of all rows, and 0 elsewhere: (rows, tokens, k) for a `shape` of (rows, tokens).

    The result is no view of another tensor: FSDP2 warns of a model that returns a view.
    """
    places = kept.div(shape[1], rounding_mode="floor"), kept % shape[1]
    return values.new_zeros(*shape, values.shape[1]).index_put(places, values)


def token_nll(
    model, inputs: dict, labels: torch.Tensor, kept: torch.Tensor, chunk_rows: int
) -> tuple[torch.Tensor, bool]:
    """Run a causal language model whose head is a torch.nn.Linear, for `labels` (rows, tokens).

    `kept` (n,) are the places of the labels in all rows. Returns fp32 -log p(labels), (rows, tokens), 0 where IGNORE,
    and True. In two cases it must return logits (rows, tokens, vocab) and False: a head sharded over tp, or a model that
    changes its logits after the head (soft caps, scales).
    """
    language_model = model.get_output_embeddings.__self__  # without the wrappers of DeepSpeed and peft
    head, gave_losses = language_model.get_output_embeddings(), False
    flat_labels, config = labels.flatten(), language_model.config

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal gave_losses
        weight, bias = head.weight, head.bias
        if isinstance(weight, DTensor) or not head_is_last(type(config), config.to_json_string(False)):
            return torch.nn.Linear.forward(head, hidden)
        gave_losses = True
        losses = linear_nll(hidden.flatten(0, -2)[kept], weight, bias, flat_labels[kept], chunk_rows)
        return at_places(losses[:, None], kept, labels.shape)

    with forward_replaced(head, forward):
        output = model(**inputs).logits
    return (output.squeeze(-1), True) if gave_losses else (output, False)


@contextlib.contextmanager
def forward_replaced(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Call `forward` in place of the module's own, inside this context."""
    module.forward = forward  # found before the `forward` of the class; hooks still run
    try:
        yield
    finally:
        del module.forward


@functools.cache
def head_is_last(config_class: type, config_json: str) -> bool:
    """Return whether a model returns the output of its head unchanged. This runs a copy without weights and layers."""
    config = config_class.from_dict(json.loads(config_json))
    outputs = []
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            hidden = torch.zeros(1, 1, model.get_output_embeddings().in_features)
            model.base_model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden)
            model.get_output_embeddings().register_forward_hook(lambda module, args, output: outputs.append(output))
            logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except (ValueError, AttributeError):  # remote code: an unknown class, or other outputs
        return False
    return logits is outputs[-1]

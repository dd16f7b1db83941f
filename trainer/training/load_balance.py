"""Load-balancing loss of mixture-of-experts models. It is per answer, so no layout or micro-batch size changes it."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from trainer.errors import UserError
from trainer.models.sequence_sums import counts_here, sum_by_sequence


def experts_per_token(config) -> int:
    """The number of experts per token. Raises UserError if a model has no experts or does not return router logits."""
    text = config.get_text_config()
    if not hasattr(text, "output_router_logits") or not getattr(text, "num_experts_per_tok", None):
        found = f"{text.model_type} does not return the logits of a router over experts"
        raise UserError("--aux_loss_coef", found, "0, or a mixture of experts such as qwen3_moe, mixtral, olmoe")
    return text.num_experts_per_tok


@contextlib.contextmanager
def recorded_router_logits(model) -> Iterator[list[torch.Tensor]]:
    """The layers' router logits, each (rows * tokens, experts). The first forward pass of `model` fills the list."""
    language_model, recorded = model.get_output_embeddings.__self__, []  # without the wrappers of DeepSpeed and peft

    def ask(module, args, kwargs):
        return args, kwargs | {"output_router_logits": True}

    def keep(module, args, output):
        if not recorded:  # a second pass comes from a reference that is the base of the same adapter
            recorded.extend(output.router_logits)

    hooks = language_model.register_forward_pre_hook(ask, with_kwargs=True), language_model.register_forward_hook(keep)
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def balance_losses(
    router_logits: list[torch.Tensor], micro_batch: dict, num_sequences: int, top_k: int, sp_group
) -> torch.Tensor:
    """The loss E * sum_e f_e P_e of each sequence, (num_sequences,), fp64; all-reduced over sp.

    f_e is the share of a sequence's tokens sent to expert e, and P_e is the router's mean probability of e. Both are
    over all layers. This is Fedus et al. 2022, Switch Transformers, equations 4 to 6, for k experts as in transformers'
    `load_balancing_loss_func`. It takes one sequence at a time, as in DeepSeek-AI 2024, DeepSeek-V3, equations 17 to
    20. Others often take a whole micro-batch. The loss would then change with the number of ranks and of samples in it.
    """
    mask, ids = micro_batch["is_token"], micro_batch["sequence_ids"]
    probabilities = torch.stack(router_logits).float().softmax(-1)  # (layers, rows * tokens, experts)
    num_layers, _, num_experts = probabilities.shape
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
    shares, means = (
        sum_by_sequence(values.sum(0).unflatten(0, mask.shape) * mask[..., None], ids, num_sequences, sp_group)
        for values in (chosen, probabilities)
    )
    lengths = num_layers * sum_by_sequence(mask, ids, num_sequences, sp_group)[:, None]
    return num_experts * (shares / lengths * means / lengths).sum(-1)


def with_balance_loss(loss_fn: Callable, aux_loss_coef: float, top_k: int, sp_group) -> Callable:
    """`loss_fn` of pairs or single answers, plus `aux_loss_coef` times the mean load-balancing loss of answers."""

    def loss(model, micro_batch: dict, **mean):
        with recorded_router_logits(model) as router_logits:
            total, count, metrics = loss_fn(model, micro_batch, **mean)
        per_target = 2 if "margins" in micro_batch else 1
        num_sequences = per_target * len(micro_batch["margins" if per_target == 2 else "desirable"])
        losses = balance_losses(router_logits, micro_batch, num_sequences, top_k, sp_group)
        balance = counts_here(sp_group) * losses.sum() / per_target
        return total + aux_loss_coef * balance, count, metrics | {"aux_loss": balance.detach()}

    return loss

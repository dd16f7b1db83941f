"""Load-balancing loss of mixtures of experts: E * sum_e f_e P_e, of each answer or of the whole global batch.

f_e is the share of tokens sent to expert e, and P_e is the router's mean probability of e. Both are over all layers.
This is Fedus et al. 2021, Switch Transformers, equations 4 to 6, for k experts as in transformers'
`load_balancing_loss_func`. Others often take the tokens of a micro-batch. The loss would then change with the number of
ranks and of samples in it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from trainer.checkpoints.model_folder import read_config
from trainer.errors import UserError
from trainer.metrics import MetricSum
from trainer.models.sequence_sums import counts_here, sum_by_sequence
from trainer.training.loop import LossFunction, TwoPassLoss


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


def _choices(router_logits: list[torch.Tensor], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(1 for the chosen experts and 0 for others, probabilities), both (layers, rows * tokens, experts), fp32."""
    probabilities = torch.stack(router_logits).float().softmax(-1)
    return torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0), probabilities


def balance_losses(
    router_logits: list[torch.Tensor], micro_batch: dict, num_sequences: int, top_k: int, sp_group
) -> torch.Tensor:
    """The loss of each sequence, (num_sequences,), fp64; all-reduced over sp.

    One sequence at a time, as in DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20.
    """
    mask, ids = micro_batch["is_token"], micro_batch["sequence_ids"]
    chosen, probabilities = _choices(router_logits, top_k)
    num_layers, _, num_experts = probabilities.shape
    shares, means = (
        sum_by_sequence(values.sum(0).unflatten(0, mask.shape) * mask[..., None], ids, num_sequences, sp_group)
        for values in (chosen, probabilities)
    )
    lengths = num_layers * sum_by_sequence(mask, ids, num_sequences, sp_group)[:, None]
    return num_experts * (shares / lengths * means / lengths).sum(-1)


def with_balance_loss(loss_fn: Callable, aux_loss_coef: float, top_k: int, sp_group) -> Callable:
    """`loss_fn` of pairs or single answers, plus `aux_loss_coef` times the mean load-balancing loss of answers."""

    def loss(model, micro_batch: dict, **sums):
        with recorded_router_logits(model) as router_logits:
            total, count, metrics = loss_fn(model, micro_batch, **sums)
        per_target = 2 if "margins" in micro_batch else 1
        num_sequences = per_target * len(micro_batch["margins" if per_target == 2 else "desirable"])
        losses = balance_losses(router_logits, micro_batch, num_sequences, top_k, sp_group)
        balance = counts_here(sp_group) * losses.sum() / per_target
        return total + aux_loss_coef * balance, count, metrics | {"aux_loss": balance.detach()}

    return loss


def mark_tokens(collate: Callable, samples: list[dict], pad_token_id: int) -> dict:
    """`collate`, with "is_token" (rows, tokens): 1 for a token of a sample, 0 for padding and if there is no sample."""
    batch = collate(samples, pad_token_id=pad_token_id)
    ones = torch.ones_like(batch["labels"])
    return batch | {"is_token": batch.get("attention_mask", ones) if samples else 0 * ones}


def balance_batches(args, folder: str, collate: Callable, loss_fn: Callable) -> tuple[Callable, LossFunction]:
    """`collate` that marks tokens, and `loss_fn` of train_sft with the load-balancing loss if there is one.

    Raises UserError if --aux_loss_coef is given and the model has no experts.
    """
    if args.aux_loss_coef:
        top_k = experts_per_token(read_config(folder, args.trust_remote_code))
        loss_fn = with_batch_balance_loss(loss_fn, args.aux_loss_coef, top_k)
    return functools.partial(mark_tokens, collate), loss_fn


def with_batch_balance_loss(loss_fn: Callable, aux_loss_coef: float, top_k: int) -> TwoPassLoss:
    """`loss_fn` of tokens, plus `aux_loss_coef` times the load-balancing loss of all tokens of the global batch.

    The first pass counts the tokens of each expert. They have no gradient, so P_e is a plain sum over micro-batches and
    ranks: their gradients add up to those of the whole batch. "expert_load" is the load of the fullest expert over the
    mean load, mean over layers. "router_entropy" is in nats, mean over tokens and layers.
    """

    def count_tokens(model, micro_batch: dict) -> torch.Tensor:
        """Tokens of each expert in each layer, then the numbers of tokens and of targets: (layers * experts + 2,)."""
        with recorded_router_logits(model) as router_logits:
            _, num_targets = loss_fn(model, micro_batch)
        chosen, _ = _choices(router_logits, top_k)
        mask = micro_batch["is_token"].flatten()
        loads = (chosen * mask[:, None]).sum(1).flatten()
        return torch.cat([loads, mask.sum()[None], num_targets[None]])

    def loss(model, micro_batch: dict, sums: torch.Tensor):
        with recorded_router_logits(model) as router_logits:
            total, count = loss_fn(model, micro_batch)
        _, probabilities = _choices(router_logits, top_k)
        num_layers, _, num_experts = probabilities.shape
        mask, loads = micro_batch["is_token"].flatten(), sums[:-2].view(num_layers, num_experts)
        num_routed, num_targets = num_layers * sums[-2], sums[-1]
        summed = (probabilities * mask[:, None]).sum((0, 1)).double()  # (experts,)
        balance = num_experts * (loads.sum(0) / num_routed * summed / num_routed).sum()
        balance = balance * num_targets  # the strategy divides by this number
        entropies = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1).detach()
        metrics = {
            "aux_loss": balance.detach(),
            "expert_load": count * (loads.amax(1) / loads.mean(1)).mean(),
            "router_entropy": MetricSum((entropies * mask).sum(), count=num_layers * mask.sum()),
        }
        return total + aux_loss_coef * balance, count, metrics

    return TwoPassLoss(count_tokens, loss)

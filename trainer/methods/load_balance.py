"""Load-balancing loss of mixtures of experts: E * sum_e f_e P_e, of all tokens of the global batch.

f_e is the share of tokens sent to expert e, and P_e is the router's mean probability of e. Both are over all layers.
This is Fedus et al. 2021, Switch Transformers, equations 4 to 6, for k experts as in transformers'
`load_balancing_loss_func`. Other trainers often take only the tokens of a micro-batch. Their loss changes with the number
of ranks and with the size of a micro-batch.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from trainer.errors import UserError
from trainer.metrics import MetricSum
from trainer.models.losses.token_losses import label_log_probs
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


def mark_tokens(collate: Callable, samples: list[dict], pad_token_id: int) -> dict:
    """`collate`, with "is_token" (rows, tokens): 1 for a token of a sample, 0 for padding and if there is no sample."""
    batch = collate(samples, pad_token_id=pad_token_id)
    ones = torch.ones_like(batch["labels"])
    return batch | {"is_token": batch.get("attention_mask", ones) if samples else 0 * ones}


def with_batch_balance_loss(loss_fn: LossFunction, aux_loss_coef: float, top_k: int) -> TwoPassLoss:
    """`loss_fn`, plus `aux_loss_coef` times the load-balancing loss of all tokens of the global batch, prompts included.

    The first pass counts the tokens of each expert. They have no gradient, so P_e is a plain sum over micro-batches and
    ranks: their gradients add up to the gradient of the whole batch. "expert_load" is the load of the fullest expert over
    the mean load, mean over layers. "router_entropy" is in nats, mean over tokens and layers.
    """

    def count_tokens(model, micro_batch: dict) -> torch.Tensor:
        """The sums of the first pass of `loss_fn`, if it has one. Then the tokens of each expert in each layer, and the
        number of tokens."""
        first = [loss_fn.first_pass(model, micro_batch)] if isinstance(loss_fn, TwoPassLoss) else []
        with recorded_router_logits(model) as router_logits:
            label_log_probs(model, micro_batch)
        chosen, _ = _choices(router_logits, top_k)
        mask = micro_batch["is_token"].flatten()
        loads = (chosen * mask[:, None]).sum(1).flatten()
        return torch.cat([*first, loads.double(), mask.sum()[None].double()])

    def loss(model, micro_batch: dict, sums: torch.Tensor, num_targets: int):
        with recorded_router_logits(model) as router_logits:
            if isinstance(loss_fn, TwoPassLoss):
                total, count, *metrics = loss_fn.loss(model, micro_batch, sums=sums, num_targets=num_targets)
            else:
                total, count, *metrics = loss_fn(model, micro_batch)
        _, probabilities = _choices(router_logits, top_k)
        num_layers, _, num_experts = probabilities.shape
        loads = sums[-1 - num_layers * num_experts : -1].view(num_layers, num_experts)
        mask = micro_batch["is_token"].flatten()
        num_routed = num_layers * sums[-1]
        summed = (probabilities * mask[:, None]).sum((0, 1)).double()  # (experts,)
        balance = num_experts * (loads.sum(0) / num_routed * summed / num_routed).sum()
        balance = balance * num_targets  # the strategy divides by this number
        entropies = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1).detach()
        own = {
            "aux_loss": balance.detach(),
            "expert_load": count * (loads.amax(1) / loads.mean(1)).mean(),
            "router_entropy": MetricSum((entropies * mask).sum(), count=num_layers * mask.sum()),
        }
        return total + aux_loss_coef * balance, count, (metrics[0] if metrics else {}) | own

    return TwoPassLoss(count_tokens, loss)

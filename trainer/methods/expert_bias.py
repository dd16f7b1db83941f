"""Balance experts without an auxiliary loss: after each step, a bias of the router moves towards equal loads.

A router with `e_score_correction_bias` adds it to the scores by which it chooses experts, and not to their weights.
After a step, the bias of expert e grows by rate * sign(mean load - load of e). A load is the number of tokens of the
global batch, so the layout changes nothing. This is algorithm 1 of Wang et al. 2024, "Auxiliary-Loss-Free Load
Balancing Strategy for Mixture-of-Experts", as DeepSeek-V3 uses it.
"""

import functools
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer.errors import UserError
from trainer.training.loop import LossFunction, TwoPassLoss

NAME, FLAG = "e_score_correction_bias", "--expert_bias_update_rate"


def balance_by_bias(strategy, model, loss_fn: LossFunction, rate: float) -> LossFunction:
    """Return `loss_fn`, for batches with marked tokens. After each step of a torch optimizer, biases move by `rate`.

    Raises UserError if no router of `model` has such a bias.
    """
    balance = ExpertBias(strategy, model, rate)
    register_optimizer_step_post_hook(balance.move)
    if isinstance(loss_fn, TwoPassLoss):
        return TwoPassLoss(loss_fn.first_pass, balance.counting(loss_fn.loss))
    return balance.counting(loss_fn)


def find_routers(model) -> list[tuple]:
    """(block of experts, the module in it that has the bias) of each layer. Raises UserError if there is none."""
    found = []
    for block in model.modules():
        owner = next((m for m in block.modules() if hasattr(m, NAME)), None) if hasattr(block, "experts") else None
        if owner is not None:
            found.append((block, owner))
    if not found:
        found = f"no router of {model.config.get_text_config().model_type} has {NAME}"
        raise UserError(FLAG, found, "0, or a mixture of experts such as deepseek_v3, glm4_moe, minimax_m2")
    return found


class ExpertBias:
    """Counts the tokens of each expert in the forward passes of a step, then moves the biases."""

    def __init__(self, strategy, model, rate: float):
        """Raises UserError if no router of `model` has a bias for its choice."""
        self.strategy, self.rate = strategy, rate
        self.mask = None  # of the micro-batch that runs: 1 for a token, 0 for padding
        self.loads: list = []  # of this rank, by layer: the tokens of each expert since the last step
        self.routers = []  # by layer: (module, name) of the bias. A strategy may replace the tensor.
        for block, owner in find_routers(model):
            hook = functools.partial(self._count, len(self.routers))
            block.experts.register_forward_pre_hook(hook, with_kwargs=True)
            self.routers.append(owner)

    def counting(self, loss_fn: Callable) -> Callable:
        """`loss_fn`, whose forward passes are counted while they have gradients."""

        def loss(model, micro_batch: dict, **sums):
            if torch.is_grad_enabled():
                self.mask = micro_batch["is_token"].flatten().double()
                self.loads = self.loads or [self.mask.new_zeros(bias.numel()) for bias in self._biases()]
            try:
                return loss_fn(model, micro_batch, **sums)
            finally:
                self.mask = None

        return loss

    def _biases(self) -> list[torch.Tensor]:
        biases = [getattr(router, NAME) for router in self.routers]
        if any(bias.dtype != torch.float32 for bias in biases):
            raise UserError(FLAG, f"with a bias in {biases[0].dtype}, which loses small moves", "--param_dtype fp32")
        return biases

    def _count(self, layer: int, module, args: tuple, kwargs: dict) -> None:
        """Runs before the experts of a layer. Their arguments are hidden states, indices of experts, and weights."""
        if self.mask is not None:  # else it is an evaluation, or a forward pass again in the backward pass
            chosen = next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())
            self.loads[layer].scatter_add_(0, chosen.flatten(), self.mask.repeat_interleave(chosen.shape[-1]))

    @torch.no_grad()
    def move(self, *_) -> None:
        """Move the biases and forget the loads. Every rank calls it after each torch optimizer's step."""
        if self.loads:  # else this is the step of a further group of parameters
            for bias, load in zip(self._biases(), self.strategy.all_reduce(torch.stack(self.loads))):
                bias.add_(self.rate * (load.mean() - load).sign().view(bias.shape).to(bias.dtype))
            self.loads = []

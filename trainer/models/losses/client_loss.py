"""Losses that a client of the training API names: a sum over tokens, with the names and constants of Tinker's API."""

from collections.abc import Callable

import torch

from trainer.models.losses.policy_loss import bounded, cispo_loss, ppo_loss
from trainer.models.losses.token_losses import label_log_probs


def _cross_entropy(log_probs, given: dict, config: dict) -> torch.Tensor:
    return -log_probs * given["weights"]


def _importance_sampling(log_probs, given: dict, config: dict) -> torch.Tensor:
    return -bounded(log_probs - given["logprobs"]).exp() * given["advantages"]


def _bounds(config: dict) -> tuple[float, float]:
    return 1 - config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2) - 1


def _ppo(log_probs, given: dict, config: dict) -> torch.Tensor:
    return ppo_loss(log_probs - given["logprobs"], given["advantages"], *_bounds(config))[0]


def _cispo(log_probs, given: dict, config: dict) -> torch.Tensor:
    log_ratio = (log_probs - given["logprobs"]).detach()
    return cispo_loss(log_probs, log_ratio, given["advantages"], *_bounds(config))[0]


# name: (what each token needs, names of constants, function). One loss per token, as in the documents of Tinker's API
CLIPS = ("clip_low_threshold", "clip_high_threshold")
CLIENT_LOSSES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable]] = {
    "cross_entropy": (("weights",), (), _cross_entropy),
    "importance_sampling": (("logprobs", "advantages"), (), _importance_sampling),
    "ppo": (("logprobs", "advantages"), CLIPS, _ppo),
    "cispo": (("logprobs", "advantages"), CLIPS, _cispo),
}


def client_loss(model, micro_batch: dict, name: str, config: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses of the tokens, their log-probs), both (rows, tokens); 0 where there is no label.

    The micro-batch has one tensor (rows, tokens) for each input of the loss, fp64.
    """
    log_probs = label_log_probs(model, micro_batch).double()
    return CLIENT_LOSSES[name][2](log_probs, micro_batch, config), log_probs

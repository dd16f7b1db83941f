"""Mixtures of experts: the load-balancing loss (--aux_loss_coef) and the bias of routers (--expert_bias_update_rate)."""

import functools

import torch

from trainer.methods.expert_bias import balance_by_bias, find_routers
from trainer.methods.load_balance import experts_per_token, mark_tokens, with_batch_balance_loss
from trainer.model_folders.model_folder import read_config
from trainer.models.model_loading import model_class
from trainer.runs.feature import Feature


def check_experts(run) -> None:
    """Raise UserError if the model has no experts to balance, or no biases to move."""
    if run.flags.aux_loss_coef:
        experts_per_token(read_config(run.setup.folder, run.args.model.trust_remote_code))
    if run.flags.expert_bias_update_rate:
        check_biases(run)


def check_biases(run) -> None:
    """Raise UserError if no router of the model has a bias. With rows of images, another class may be loaded later."""
    remote_code = run.args.model.trust_remote_code
    config = read_config(run.setup.folder, remote_code)
    if model_class(config, run.auto_class._model_mapping) is not None:
        with torch.device("meta"):
            find_routers(run.auto_class.from_config(config, trust_remote_code=remote_code))


def mark_rows(run) -> None:
    """Let micro-batches say which tokens are no padding."""
    if not run.method.marks_tokens:
        run.collate_rows = functools.partial(mark_tokens, run.collate_rows)


def balance(run) -> None:
    """Add the load-balancing loss of the global batch, and move the biases after each step."""
    coef, rate = run.flags.aux_loss_coef, run.flags.expert_bias_update_rate
    if coef:
        run.loss_fn = with_batch_balance_loss(run.loss_fn, coef, experts_per_token(run.model.config))
    if rate:
        run.loss_fn = balance_by_bias(run.setup.strategy, run.model, run.loss_fn, rate)


EXPERTS = Feature(
    "experts",
    lambda run: run.flags.aux_loss_coef or run.flags.expert_bias_update_rate,
    before_data=check_experts,
    with_data=mark_rows,
    with_loss=balance,
)

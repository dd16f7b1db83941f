"""Mixtures of experts: the load-balancing loss (--aux_loss_coef) and the bias of routers (--expert_bias_update_rate)."""

import functools

from trainer.methods.expert_bias import balance_by_bias
from trainer.methods.load_balance import experts_per_token, mark_tokens, with_batch_balance_loss
from trainer.model_folders.model_folder import read_config
from trainer.runs.feature import Feature


def mark_rows(run) -> None:
    """Let micro-batches say which tokens are no padding. Raises UserError if the model has no experts to balance."""
    if run.flags.aux_loss_coef:
        experts_per_token(read_config(run.setup.folder, run.args.model.trust_remote_code))
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
    with_data=mark_rows,
    with_loss=balance,
)

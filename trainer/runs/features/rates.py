"""With --max_steps, the steps are known before data is read, and so is a schedule whose rates are all 0."""

from trainer.optimizers.build import check_rates
from trainer.runs.feature import Feature


def check_schedule(run) -> None:
    """Raise UserError for learning rates that are 0 in every step."""
    optim = run.args.optimizer
    ends = {"warmup_ratio": optim.lr_warmup_ratio, "min_lr_ratio": optim.min_lr_ratio}
    ends["warmup_steps"] = optim.warmup_steps
    check_rates(optim.lr_scheduler, optim.learning_rate, run.args.batch.max_steps, **ends)


RATES = Feature("rates", lambda run: run.args.batch.max_steps, before_data=check_schedule)

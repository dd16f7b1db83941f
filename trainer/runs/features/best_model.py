"""`--load_best_model_at_end` and `--early_stopping_patience`: the saved model is that of the best evaluation."""

from trainer.runs.feature import Feature


def load_best(run) -> None:
    """Load the weights of the best evaluation. From here on, the progress of the run is that up to it."""
    run.progress = run.checkpoints.load_best(run.progress)


BEST_MODEL = Feature(
    "best model",
    lambda run: run.flags.load_best_model_at_end or run.flags.early_stopping_patience,
    before_save=load_best,
)

"""The features of a run: what a flag or the data add to it, one file for each, in the order of application.

A feature is a few functions that `run_training.train` calls at fixed places. Each function takes the run and changes
it. A feature without a function for a place changes nothing there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.runs.run import Run


def nothing(run: Run) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Feature:
    """One feature. `is_used(run)` is asked before each place, since data may bring a feature."""

    name: str
    is_used: Callable[[Run], Any]
    before_data: Callable[[Run], None] = nothing  # may replace run.load_data
    with_data: Callable[[Run], None] = nothing  # may replace the samples, run.collate, run.auto_class
    with_model: Callable[[Run], None] = nothing  # run.model is loaded; it has no optimizer yet
    with_loss: Callable[[Run], None] = nothing  # may replace run.loss_fn
    at_end: Callable[[Run], None] = nothing  # all is saved

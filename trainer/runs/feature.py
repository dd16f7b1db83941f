"""The features of a run: what a flag or the data add to it, in the order of application.

A feature is a few functions that `run_training.train` and `rl_run.train` call at fixed places. Each function takes the run and changes
it. A feature without a function for a place changes nothing there.
"""

from collections.abc import Callable, Iterable
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
    before_setup: Callable[[Run], None] = nothing  # may replace run.args
    before_data: Callable[[Run], None] = nothing  # may replace run.load_data
    with_data: Callable[[Run], None] = nothing  # may replace the samples, run.collate_rows, run.auto_class
    with_model: Callable[[Run], None] = nothing  # run.model is loaded; it has no optimizer yet
    with_loss: Callable[[Run], None] = nothing  # may replace run.loss_fn
    with_roles: Callable[[Run], None] = nothing  # RL: run.roles are built
    with_logs: Callable[[Run], None] = nothing  # RL: run.ppo is complete but for what it writes
    before_save: Callable[[Run], None] = nothing  # the loop is over
    at_end: Callable[[Run], None] = nothing  # all is saved


def apply(features: Iterable[Feature], run: Run, place: str) -> None:
    """Call the functions that the features of this run have for a place, in the order of the list."""
    for feature in features:
        if feature.is_used(run):
            vars(feature)[place](run)

"""`torchrun ddp_runs.py FILE`: trainer.compare.runs.many_runs with ddp_strategy.py instead of every backend."""

import sys

from ddp_strategy import DDPStrategy

import trainer.strategies
from trainer.compare.runs import many_runs
from trainer.entry import run_command
from trainer.strategies.options import StrategyOptions


def get_ddp_strategy(backend: str, options: StrategyOptions) -> DDPStrategy:
    return DDPStrategy(options)


if __name__ == "__main__":
    trainer.strategies.get_strategy = get_ddp_strategy
    run_command(many_runs.main, sys.argv[1:])

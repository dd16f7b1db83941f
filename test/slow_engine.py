"""Command lines of train_ppo with an engine that takes longer, as one on other machines does: SECONDS FILE, as torchrun.

The engine sleeps SECONDS before each batch of responses, which costs no core. The rest is `trainer.compare.many_runs`.
"""

import sys
import time

from trainer.cli.entry import run_command
from trainer.compare import many_runs
from trainer.rollout.hf import HFEngine


def main(argv: list[str]) -> None:
    seconds, file = argv
    generate_batch = HFEngine._generate_batch

    def slowly(self, *arguments):
        time.sleep(float(seconds))
        return generate_batch(self, *arguments)

    HFEngine._generate_batch = slowly
    many_runs.main([file])


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

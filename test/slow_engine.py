"""Command lines of train_ppo with engines and trainers on other machines: (SECONDS SECONDS FILE)..., as torchrun.

The engine takes so many seconds more for each batch of responses, and an optimizer step takes the second number more. Both
cost no core of this machine. Rows get the `time` at their end. The rest is `trainer.compare.runs.many_runs`.
"""

import sys
import time

from trainer.compare.runs import many_runs
from trainer.entry import run_command
from trainer.methods import ppo
from trainer.rollout.engines.hf import HFEngine


def main(argv: list[str]) -> None:
    generate_batch, update_actor, delays = HFEngine._generate_batch, ppo.update_actor, {}

    def slow_batch(*arguments):
        time.sleep(delays["generating"])
        return generate_batch(*arguments)

    def slow_update(*arguments) -> dict:
        time.sleep(delays["training"])
        return {**update_actor(*arguments), "time": time.time()}

    HFEngine._generate_batch, ppo.update_actor = slow_batch, slow_update
    for generating, training, file in zip(argv[0::3], argv[1::3], argv[2::3]):
        delays |= {"generating": float(generating), "training": float(training)}
        many_runs.main([file])


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

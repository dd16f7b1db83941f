"""Simulated: the share of time that generating and training ranks idle, with a queue of prompts and with a static split.

    python scripts/bench/queue_idle.py [--trainers 64] [--servers 192] [--rollouts 30] [--seeds 5]

A token takes the same time in every request. Training a rollout takes as long as generating it without any idle time.
"""

import argparse
import random
import statistics

from trainer.planning.idle_share import Lengths, simulated

ROOM = 32  # requests in flight on a server
PROMPTS, GROUP = 1024, 16  # of a rollout
LENGTHS = Lengths(median=2000, spread=0.9, longest=32_768)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("trainers", 64), ("servers", 192), ("rollouts", 30), ("seeds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    drivers = min(args.trainers, args.servers)
    slots = args.servers * ROOM // drivers
    print("| | staleness | generating ranks idle | training ranks idle |\n|---|---:|---:|---:|")
    ways = {
        "static split": {"queue": False},
        "queue, in batches": {"queue": True},
        "queue, refilled slots": {"queue": True, "barrier": False, "drains": True},
        "the same, --partial_rollouts": {"queue": True, "barrier": False},
    }
    for staleness in (0, 1, 2, 4):
        for name, way in ways.items():
            found = []
            for seed in range(args.seeds):
                chance = random.Random(seed)
                rollouts = [LENGTHS.sample(chance, PROMPTS, GROUP) for _ in range(args.rollouts)]
                total = sum(time for rollout in rollouts for group in rollout for time in group)
                train_time = total / len(rollouts) / (drivers * slots)
                options = {"drivers": drivers, "slots": slots, "train_time": train_time}
                idle = simulated(rollouts, **options, staleness=staleness, **way)
                found.append((idle.generating, idle.training))
            generating, training = (statistics.mean(values) for values in zip(*found))
            print(f"| {name} | {staleness} | {generating:.0%} | {training:.0%} |")


if __name__ == "__main__":
    main()

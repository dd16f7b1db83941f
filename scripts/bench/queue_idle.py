"""Simulated: the share of time that generating and training ranks idle, with a queue of prompts and with a static split.

    python scripts/bench/queue_idle.py [--trainers 64] [--servers 192] [--rollouts 30] [--seeds 5]

A token takes the same time in every request. Training a rollout takes as long as generating it without any idle time.
"""

import argparse
import bisect
import heapq
import random
import statistics
from collections.abc import Sequence

ROOM = 32  # requests in flight on a server
PROMPTS, GROUP = 1024, 16  # of a rollout
MEDIAN, SPREAD, LONGEST = 2000, 0.9, 32_768  # tokens: log-normal, with half of the variance between prompts


def draw_lengths(chance: random.Random) -> list[list[float]]:
    """The tokens of each response of a rollout, by prompt."""
    part = SPREAD / 2**0.5
    found = []
    for _ in range(PROMPTS):
        middle = MEDIAN * chance.lognormvariate(0, part)
        found.append([min(middle * chance.lognormvariate(0, part), LONGEST) for _ in range(GROUP)])
    return found


def idle_shares(
    rollouts: Sequence[Sequence[Sequence[float]]],
    *,
    drivers: int,
    slots: int,
    train_time: float,
    staleness: int,
    queue: bool,
    barrier: bool = True,
    drains: bool = False,
) -> tuple[float, float]:
    """(idle share of the generating slots, of training) from the first token to the last optimizer step.

    `rollouts` have the time of each response, by prompt. A driver has `slots` at a time. With `barrier`, it takes as many
    responses, and the next ones when all have ended. Without, each slot takes its next response at once. `queue`: drivers
    take prompts when they are free. Else each has a fixed share of a rollout. Rollout r begins once training begins on
    rollout r - staleness, or with staleness 0 once the one before is trained. `drains`, without a barrier: a driver takes
    the newest weights when all its slots are free, and its slots wait for that when rollout r needs newer weights.
    """
    width = slots if barrier else 1
    units = drivers if barrier else drivers * slots
    free, began, trained = [0.0] * units, [], 0.0
    held, ready, ends = [0] * drivers, [0.0] * drivers, []  # versions, when they came, and when each one was trained
    busy = sum(time for rollout in rollouts for group in rollout for time in group)
    for number, rollout in enumerate(rollouts):
        gate = trained if not staleness else began[number - staleness] if number >= staleness else 0.0
        times, made = [time for group in rollout for time in group], gate
        if queue:
            heap = [(at, unit) for unit, at in enumerate(free)]
            heapq.heapify(heap)
            for start in range(0, len(times), width):
                at, unit = heapq.heappop(heap)
                at, driver = max(at, gate), unit // slots
                if drains and held[driver] < number - staleness:
                    ready[driver] = max(at, *free[driver * slots : (driver + 1) * slots])
                    held[driver] = bisect.bisect_right(ends, ready[driver])
                if drains:
                    at = max(at, ready[driver])
                free[unit] = at + max(times[start : start + width])
                made = max(made, free[unit])
                heapq.heappush(heap, (free[unit], unit))
        else:
            for unit in range(units):
                own = times[len(times) * unit // units : len(times) * (unit + 1) // units]
                for start in range(0, len(own), width):
                    free[unit] = max(free[unit], gate) + max(own[start : start + width])
                    made = max(made, free[unit])
        began.append(max(made, trained))
        trained = began[-1] + train_time
        ends.append(trained)
    return 1 - busy / (drivers * slots * trained), 1 - train_time * len(rollouts) / trained


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
                rollouts = [draw_lengths(chance) for _ in range(args.rollouts)]
                total = sum(time for rollout in rollouts for group in rollout for time in group)
                train_time = total / len(rollouts) / (drivers * slots)
                options = {"drivers": drivers, "slots": slots, "train_time": train_time}
                found.append(idle_shares(rollouts, **options, staleness=staleness, **way))
            generating, training = (statistics.mean(values) for values in zip(*found))
            print(f"| {name} | {staleness} | {generating:.0%} | {training:.0%} |")


if __name__ == "__main__":
    main()

"""How long generating and training ranks of reinforcement learning idle: a simulation from lengths and speeds.

A token takes the same time in every response. No time is lost between a response and the next one, nor in syncs.
"""

import bisect
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal, and at most `longest`. Half of the variance is between prompts."""

    median: float
    spread: float  # standard deviation of the logarithm
    longest: float

    def sample(self, chance: random.Random, prompts: int, group: int) -> list[list[float]]:
        """The tokens of each response of a rollout, by prompt."""
        part = self.spread / 2**0.5
        found = []
        for _ in range(prompts):
            middle = self.median * chance.lognormvariate(0, part)
            found.append([min(middle * chance.lognormvariate(0, part), self.longest) for _ in range(group)])
        return found


@dataclass(frozen=True)
class Idle:
    """Shares of the time from the first token to the last optimizer step, which is `seconds`."""

    generating: float  # of the slots
    training: float
    seconds: float


def simulated(
    rollouts: Sequence[Sequence[Sequence[float]]],
    *,
    drivers: int,
    slots: int,
    train_time: float,
    staleness: int,
    queue: bool,
    barrier: bool = True,
    drains: bool = False,
) -> Idle:
    """The idle shares of a run of `rollouts`, which have the time of each response, by prompt.

    A driver has `slots` at a time. With `barrier`, it takes as many responses, and the next ones when all have ended.
    Without, each slot takes its next response at once. `queue`: drivers take prompts when they are free. Else each has a
    fixed share of a rollout. Rollout r begins once training begins on rollout r - staleness. With staleness 0, it begins
    once the one before is trained. `drains`, without a barrier: a driver takes the newest weights when all its slots are
    free. Its slots wait for that when rollout r needs newer weights.
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
    return Idle(1 - busy / (drivers * slots * trained), 1 - train_time * len(rollouts) / trained, trained)

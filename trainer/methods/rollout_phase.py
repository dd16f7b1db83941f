"""The first phases of a rollout: sync the weights, generate responses, score them. Also the evaluation, which does the same."""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any

from trainer.distributed.collectives import broadcast_object
from trainer.errors import UserError
from trainer.limits import limit
from trainer.methods import advantages as adv
from trainer.methods.ppo_state import PPOOptions, Recorded, RLState, Roles
from trainer.methods.rollout_facts import sample_facts, scores_of
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.engines.servers import FIRST_PAUSE, LONGEST_PAUSE, LostServer
from trainer.rollout.engines.sync import sync_weights
from trainer.rollout.envs.episodes import generate_episodes
from trainer.rollout.evaluation import NUMBERS, Evaluation
from trainer.rollout.generation import generate_samples
from trainer.rollout.samples import Sample
from trainer.rollout.scoring import check_failed
from trainer.rollout.timeline import span, timed

MAX_FILTERING_ROUNDS = 20  # dynamic filtering gives up after 20 times the prompts of a rollout


def sync(strategy, roles: Roles, step: int) -> dict:
    """Send the weights of this step to the engine, unless it already has them. Returns the metrics of that sync."""
    if roles.engine is not None and roles.synced_step != step:
        with span("sync"):
            roles.sync_facts = sync_weights(strategy, roles.actor[0], roles.engine)
        roles.synced_step = step
    return roles.sync_facts


@contextlib.contextmanager
def offloaded(strategy, roles: Roles):
    """Inside, what the flags name is in host memory. Weights are synced and responses generated inside.

    A thread that generates ahead waits meanwhile. The flags cannot be combined with it.
    """
    if roles.ahead is not None:
        roles.synced_step = None
        with roles.ahead.paused():
            yield
        return
    kept = strategy.offload(optimizer=roles.actor[1]) if roles.offload_actor_optimizer else []
    kept += strategy.offload(model=roles.critic[0], optimizer=roles.critic[1]) if roles.offload_critic else []
    try:
        yield
    finally:
        strategy.onload(kept)


def generate(roles: Roles, prompts: list[dict], num_each: int, sampling: Sampling, **numbers) -> list[Sample]:
    """Samples of each prompt: one response, or with an environment a conversation and its score.

    `numbers` (seed, rollout, first) decide the random numbers, see `generate_samples`.
    """
    if roles.environment is None:
        return generate_samples(roles.engine, prompts, num_each, sampling, **numbers)
    return generate_episodes(roles.environment, roles.engine, prompts, num_each, sampling, **numbers)


def scored_samples(roles: Roles, state: RLState, options: PPOOptions, recorded: Recorded, facts: dict) -> list[Sample]:
    """The samples of this rollout with their scores: `recorded(state)` if it has some, else generated and scored.

    Adds to `facts`. The last rollout may be shorter or empty, see `filtered_samples`.
    """
    if recorded and (samples := recorded(state)) is not None:
        return samples
    draw = functools.partial(_next_samples, roles, state, options, facts)
    return draw(0) if options.filtering_range is None else filtered_samples(draw, state, options, facts)


def filtered_samples(draw: Callable, state: RLState, options: PPOOptions, facts: dict) -> list[Sample]:
    """Dynamic filtering (DAPO, section 3.2): draw until enough prompts have scores that `groups_in_range` accepts.

    `draw(first)` gives scored samples of the next prompts, numbered from `first`. If the prompts are used up before, the rollout is shorter, or empty. Raises UserError if no prompt was accepted.
    """
    size, wanted = options.advantages.group_size, state.prompts.batch_size
    samples: list[Sample] = []
    sampled, most = 0, wanted * MAX_FILTERING_ROUNDS  # prompts
    while len(samples) < wanted * size and sampled < most and not state.is_used_up(options.num_episodes):
        new = draw(sampled * size)
        sampled += len(new) // size
        accepted = adv.groups_in_range(scores_of(new), size, *options.filtering_range)
        samples += [sample for i, sample in enumerate(new) if accepted[i // size]]
    samples = samples[: wanted * size]
    facts["prompts_drawn"] = sampled
    state.prompts_drawn, state.prompts_kept = state.prompts_drawn + sampled, state.prompts_kept + len(samples) // size
    if not samples and not (state.prompts_kept and state.is_used_up(options.num_episodes)):
        low, high = options.filtering_range
        is_bounded = math.isfinite(low)
        found = f"no prompt of {sampled} had different scores" + f" with a mean from {low:g} to {high:g}" * is_bounded
        flag = "--dynamic_filtering_range" if is_bounded else "--dynamic_filtering"
        allowed = "a wider range, the --reward_range of these scores, or " * is_bounded + "easier or harder prompts"
        raise UserError(flag, found, allowed)
    return samples


def _next_samples(roles: Roles, state: RLState, options: PPOOptions, facts: dict, first: int) -> list[Sample]:
    """Generate and score samples of the next prompts, numbered from `first`."""
    prompts = state.prompts.take(state.prompts.batch_size)
    numbers = {"seed": options.seed, "rollout": state.rollout, "first": first}
    with timed(facts, "generate"):
        samples = generate(roles, prompts, options.advantages.group_size, options.sampling, **numbers)
    with timed(facts, "reward"):
        roles.score(samples, options.advantages.group_size)
    check_failed(samples, roles.max_failed_share)
    state.prompts.note(samples)
    return samples


def answers_to(strategy, roles: Roles, evaluation: Evaluation, step: int) -> tuple[list[Sample], dict]:
    """The answers of the present policy with their scores, and the metrics of the sync (collective).

    Each evaluation has the same random numbers, whatever the layout.
    """

    def answer() -> tuple[list[Sample], dict]:
        facts = sync(strategy, roles, step)
        return generate(roles, evaluation.prompts, evaluation.num_each, evaluation.sampling, **NUMBERS), facts

    with offloaded(strategy, roles):
        samples, facts = patiently(answer, strategy, roles)
        roles.score(samples, evaluation.num_each)
        check_failed(samples, roles.max_failed_share)
    return samples, facts


def patiently(act: Callable[[], Any], strategy, roles: Roles, undo: Callable[[], None] = lambda: None) -> Any:
    """Return `act()`, which syncs and generates. While no rollout server is left, undo it, wait and call it again (broadcasts).

    All ranks raise the same LostServer. Rank 0's clock decides when it is raised for good: see --limits engine_wait_s.
    """
    began, pause, longest = time.monotonic(), FIRST_PAUSE, limit("engine_wait_s")
    while True:
        try:
            return act()
        except LostServer as error:
            if broadcast_object(time.monotonic() - began >= longest):
                raise
            if pause == FIRST_PAUSE:
                strategy.print(f"no rollout server is left, waiting up to {longest} s: {error.found}")
        undo()
        time.sleep(pause)
        pause, roles.synced_step = min(2 * pause, LONGEST_PAUSE), None  # a server that is back needs the weights


def evaluation_facts(evaluation: Evaluation, samples: list[Sample]) -> dict[str, float]:
    """Scores, shares of right answers and lengths, of all prompts and of each group."""
    facts = sample_facts(samples)
    facts |= {name: value for name, value in evaluation.facts(samples).items() if name not in facts}
    return {f"eval_{name}": value for name, value in facts.items()}

"""Rollouts with an environment: the model and the environment take turns, and generated tokens stay as they are.

The tokens of an episode are a prompt, then turns of the model and of the environment, appended one after the other.
Nothing is decoded and tokenized again, so training sees exactly the tokens that the engine generated.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED
from dataclasses import dataclass, field
from typing import Any, Optional

import torch.distributed as dist

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.datasets.conversations.messages import tools_of
from trainer.datasets.conversations.templates import render_prompt
from trainer.datasets.conversations.thoughts import opens_thoughts
from trainer.datasets.conversations.tool_formats import tool_calls
from trainer.datasets.conversations.turns import check_call_format, continuation_ids
from trainer.datasets.samples.prompts import columns_of
from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError
from trainer.rollout.engines.sampling import Completion, Sampling, sample_seed
from trainer.rollout.envs.environments import Caller, Response, Step, read_opening, read_step, reset
from trainer.rollout.placement import exchange_objects, share
from trainer.rollout.rewards.reward_functions import check_scores
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import span

SOON_SECONDS, SOON_SHARE = (
    0.03,
    0.1,
)  # after the first one, episodes that are ready so soon join: of the last generation
THOUGHT_TOKENS = 32  # so many tokens of a header hold the mark that opens thoughts


@dataclass(frozen=True)
class Environments:
    """How a run makes and calls its environments."""

    make: Callable[[], Any]
    call: Caller
    where: str  # of errors: --env NAME
    tokenizer: Any
    max_turns: int
    prompt_max_len: int
    lockstep: bool = False  # all episodes of a rollout wait for the slowest one after each turn


@dataclass
class Episode:
    """One environment and the tokens of its conversation so far."""

    number: int
    prompt: dict
    env: Any = None  # only on the rank that calls it, like the next three
    opening: list[dict] = field(default_factory=list)
    tools: Optional[list] = None
    response: Optional[Response] = None  # the last one
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # after the prompt
    log_probs: list[float] = field(default_factory=list)  # of generated tokens, like kept_ids
    kept_ids: list[list[int]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    score: float = 0.0
    done: bool = False  # the environment has ended it
    over: bool = False  # it is done, or has no tokens or turns left
    metrics: dict[str, float] = field(default_factory=dict)

    def add_turn(self, tokenizer: Any, completion: Completion) -> Response:
        """Append the tokens of a turn. Returns the turn as the environment gets it."""
        raw, start = tokenizer.decode(completion.token_ids), len(self.ids)
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        header = tokenizer.decode((self.prompt_ids + self.ids)[-THOUGHT_TOKENS:])
        calls = tool_calls(raw, self.tools, opens_thoughts(header))
        self.response = Response(text, raw, calls, completion.finished)
        self.ids += completion.token_ids
        self.turns.append([start, len(self.ids)])
        self.log_probs += completion.log_probs
        self.kept_ids += completion.kept_ids
        self.versions += [[start + at, version] for at, version in completion.versions]
        return self.response

    def go_on(self, next_ids: list[int], reward: float, done: bool, metrics: dict[str, float]) -> None:
        """Append what `_stepped` gave."""
        self.score, self.done, self.over = self.score + reward, done, not next_ids
        self.ids += next_ids
        self.metrics = metrics

    def as_sample(self) -> Sample:
        return Sample(
            number=self.number,
            row=self.prompt["row"],
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            log_probs=self.log_probs,
            finished=self.done,
            label=self.prompt["label"],
            score=self.score,
            metrics=self.metrics,
            kept_ids=self.kept_ids,
            turns=self.turns,
            versions=self.versions,
        )


def generate_episodes(
    environments: Environments,
    engine,
    prompts: list[dict],
    num_each: int,
    sampling: Sampling,
    *,
    seed: int,
    rollout: int,
    first: int = 0,
) -> list[Sample]:
    """`num_each` episodes of each prompt, as samples with scores, numbered from `first`. Every rank gets all samples, but
    only its own have tokens (see `placement.share`).

    All engines share the work. `sampling.max_new_tokens` limits all tokens after the prompt, also those of the
    environment. The score of an episode is the sum of its rewards. An episode goes on when its own step is done, see
    `_play_freely`. In lockstep, and for an engine of several ranks, see `_play`: its first rank calls the environments.
    After each turn, it sends their answers to the other ranks of its engine, and all ranks learn whether any episode
    continues (all-to-all and all-gather over the world).

    Raises:
        UserError: an environment or an engine failed on one rank. All ranks raise the same error.
    """
    per_engine = engine.ranks_per_engine
    number_of_engine, rank_in_engine = divmod(dist.get_rank(), per_engine)
    num_engines = dist.get_world_size() // per_engine
    asked = [prompt for prompt in prompts for _ in range(num_each)]
    mine = contiguous_slice(list(enumerate(asked, start=first)), number_of_engine, num_engines)

    def exchanged(answer: Callable[[], list], problem: Optional[UserError] = None) -> tuple[list, bool]:
        """(the answers from the first rank of this engine, whether any episode of any engine continues).

        If a rank has a `problem`, all ranks raise it.
        """
        own = []
        if rank_in_engine == 0 and problem is None:
            try:
                own = answer()
            except UserError as error:
                problem = error
        with span("wait"):
            found = gather_objects((problem, any(next_ids for next_ids, *_ in own)))
        problem = next((error for error, _ in found if error is not None), None)
        if problem is not None:
            raise problem
        if per_engine > 1:
            leader, ranks = dist.get_rank() - rank_in_engine, range(dist.get_world_size())
            sent = [
                own if rank_in_engine == 0 and rank in range(leader, leader + per_engine) else None for rank in ranks
            ]
            own = exchange_objects(sent)[leader]
        return own, any(going for _, going in found)

    if environments.lockstep or per_engine > 1:
        episodes = _play(environments, engine, mine, sampling, seed, rollout, exchanged)
    else:
        episodes = []

        def play() -> list:
            episodes.extend(_play_freely(environments, engine, mine, sampling, seed, rollout))
            return []

        exchanged(play)
    return share([episode.as_sample() for episode in contiguous_slice(episodes, rank_in_engine, per_engine)])


def continue_episodes(
    environments: Environments, engine, asked: list[tuple[int, dict]], sampling: Sampling, seed: int, rollout: int
) -> list[Sample]:
    """The episode of each (number, prompt), as `generation.continue_prompts`. Nothing but the engine communicates."""

    def alone(answer: Callable[[], list], problem: Optional[UserError] = None) -> tuple[list, bool]:
        if problem is not None:
            raise problem
        own = answer()
        return own, any(next_ids for next_ids, *_ in own)

    asks = (environments, engine, asked, sampling, seed, rollout)
    return [e.as_sample() for e in (_play(*asks, alone) if environments.lockstep else _play_freely(*asks))]


def _play_freely(
    environments: Environments,
    engine,
    asked: list[tuple[int, dict]],
    sampling: Sampling,
    seed: int,
    rollout: int,
) -> list[Episode]:
    """Play an episode of each (number, prompt) to its end. Each one goes on when its own step is done.

    The engine continues all episodes that are ready together. Those that are ready soon after the first one belong to
    them: so fast environments have the batches of the lockstep. The random numbers of a turn depend on its episode only.
    """
    call, episodes = environments.call, [Episode(number, prompt) for number, prompt in asked]
    called = {call.start(functools.partial(_begin, environments, episode)): (episode, None) for episode in episodes}
    ready: list[Episode] = []
    closing, patience = [], SOON_SECONDS
    try:
        while called or ready:
            first_ready = time.monotonic()
            while called and (not ready or time.monotonic() < first_ready + patience):
                seconds = first_ready + patience - time.monotonic() if ready else None
                for future in call.wait("step", called, FIRST_COMPLETED, seconds):
                    episode, completion = called.pop(future)
                    value = call.value("reset" if completion is None else "step", future)
                    if completion is None:
                        _opened(environments, episode, value)
                    else:
                        is_last = len(episode.turns) == environments.max_turns
                        episode.go_on(*_stepped(environments, episode, completion, value, sampling, is_last))
                    if not episode.over:
                        first_ready = first_ready if ready else time.monotonic()
                        ready.append(episode)
                    elif callable(getattr(episode.env, "close", None)):
                        closing.append(call.start(episode.env.close))
            if ready:
                ready.sort(key=lambda episode: episode.number)  # whoever was first
                started = time.monotonic()
                for episode, completion in zip(ready, _turns(engine, ready, sampling, seed, rollout)):
                    response = episode.add_turn(environments.tokenizer, completion)
                    called[call.start(functools.partial(episode.env.step, response))] = (episode, completion)
                ready, patience = [], max(SOON_SECONDS, SOON_SHARE * (time.monotonic() - started))
    finally:
        for future in called:  # after an error: what has not begun does not
            future.cancel()
    left = {*closing}
    while left:
        left -= call.wait("close", left, ALL_COMPLETED)
    for future in closing:
        call.value("close", future)
    return episodes


def _play(
    environments: Environments,
    engine,
    asked: list[tuple[int, dict]],
    sampling: Sampling,
    seed: int,
    rollout: int,
    exchanged: Callable[..., tuple[list, bool]],
) -> list[Episode]:
    """Play an episode of each (number, prompt) to its end. See `generate_episodes` for `exchanged`."""
    episodes = [Episode(number, prompt) for number, prompt in asked]
    opened, _ = exchanged(lambda: _open(environments, episodes))
    for episode, (prompt_ids,) in zip(episodes, opened):
        episode.prompt_ids = prompt_ids
    for turn in range(environments.max_turns):
        going = [episode for episode in episodes if not episode.over]
        completions, problem = [], None
        try:
            completions = _turns(engine, going, sampling, seed, rollout) if going else []
        except UserError as error:
            problem = error
        responses = [e.add_turn(environments.tokenizer, completion) for e, completion in zip(going, completions)]
        is_last = turn + 1 == environments.max_turns
        answer = functools.partial(_answer, environments, going, completions, responses, sampling, is_last)
        answered, any_going = exchanged(answer, problem)
        for episode, found in zip(going, answered):
            episode.go_on(*found)
        if not any_going:
            break
    return episodes


def _turns(engine, going: list[Episode], sampling: Sampling, seed: int, rollout: int) -> list[Completion]:
    """The next turn of each episode."""
    texts = [episode.prompt_ids + episode.ids for episode in going]
    seeds = [sample_seed(seed, rollout, episode.number, len(episode.turns)) for episode in going]
    room = [sampling.max_new_tokens - len(episode.ids) for episode in going]
    return engine.generate(texts, sampling, seeds, room)


def _begin(environments: Environments, episode: Episode) -> Any:
    """Make and reset the environment of an episode. Returns what `reset` gave, for `_opened`."""
    task = copy.deepcopy(columns_of(episode.prompt))  # samples of a prompt share its lists
    episode.env = environments.make()
    return reset(episode.env, task)


def _opened(environments: Environments, episode: Episode, opening: Any) -> None:
    """Render the first messages of an episode."""
    with _named(environments, "reset", episode):
        tools = getattr(episode.env, "tools", None) or columns_of(episode.prompt).get("tools")
        episode.opening, episode.tools = read_opening(opening), tools_of({"tools": tools})
        check_call_format(environments.tokenizer, episode.tools)
        episode.prompt_ids = render_prompt(environments.tokenizer, episode.opening, episode.tools)
        if len(episode.prompt_ids) > environments.prompt_max_len:
            found = f"messages of {len(episode.prompt_ids)} tokens"
            raise UserError("", found, f"up to --prompt_max_len {environments.prompt_max_len}")


def _open(environments: Environments, episodes: list[Episode]) -> list[tuple[list[int]]]:
    """Make and reset an environment for each episode. Returns the ids of their prompts."""
    begins = [functools.partial(_begin, environments, episode) for episode in episodes]
    for episode, opening in zip(episodes, environments.call("reset", begins)):
        _opened(environments, episode, opening)
    return [(episode.prompt_ids,) for episode in episodes]


def _answer(
    environments: Environments,
    going: list[Episode],
    completions: list[Completion],
    responses: list[Response],
    sampling: Sampling,
    is_last: bool,
) -> list[tuple[list[int], float, bool, dict]]:
    """Give each response to its environment. Returns what `_stepped` gives."""
    values = environments.call("step", [functools.partial(e.env.step, r) for e, r in zip(going, responses)])
    answers = [
        _stepped(environments, episode, completion, value, sampling, is_last)
        for episode, completion, value in zip(going, completions, values)
    ]
    ended = [episode.env for episode, (ids, *_) in zip(going, answers) if not ids]
    environments.call("close", [env.close for env in ended if callable(getattr(env, "close", None))])
    return answers


def _stepped(
    environments: Environments, episode: Episode, completion: Completion, value: Any, sampling: Sampling, is_last: bool
) -> tuple[list[int], float, bool, dict]:
    """(ids that follow, reward, done, metrics) of the `value` that `step` gave. No ids end an episode."""
    with _named(environments, "step", episode):
        step, ids = read_step(value), []
        try:
            if step.messages and not is_last:
                ids = _next_ids(environments.tokenizer, episode, completion, step, sampling)
        except UserError:  # the template refuses the messages
            if not hasattr(episode.env, "lose"):
                raise
            step = episode.env.lose()  # a sandbox may send anything, and loses its own episode only
        # the next turn needs room for at least one token
        ids = ids if completion.finished and len(episode.ids) + len(ids) < sampling.max_new_tokens else []
    return ids, step.reward, step.done, _metrics(environments, episode)


def _next_ids(tokenizer: Any, episode: Episode, completion: Completion, step: Step, sampling: Sampling) -> list[int]:
    last, calls = completion.token_ids[-1], episode.response.tool_calls
    return continuation_ids(
        tokenizer,
        episode.opening,
        step.messages,
        tools=episode.tools,
        call=calls[0]["name"] if calls else None,
        stop_token=last if last in sampling.stop_ids else None,
    )


def _metrics(environments: Environments, episode: Episode) -> dict[str, float]:
    """The dict `metrics` of an environment, if it has one: a number for each name."""
    metrics = getattr(episode.env, "metrics", None)
    if not isinstance(metrics, dict):
        return {}
    _, checked = check_scores(environments.where, ([0.0], metrics), 1)
    return {name: value for name, [value] in checked.items()}


@contextlib.contextmanager
def _named(environments: Environments, method: str, episode: Episode):
    """Put the name of the environment, the method and the row in front of an error inside."""
    try:
        yield
    except UserError as error:
        where = f"{environments.where}: {method}, row {episode.prompt['row'] + 1}: {error.where}"
        raise UserError(where.removesuffix(": "), error.found, error.allowed) from None

"""Rollouts with an environment: the model and the environment take turns, and generated tokens stay as they are.

The tokens of an episode are a prompt, then turns of the model and of the environment, appended one after the other.
Nothing is decoded and tokenized again, so training sees exactly the tokens that the engine generated.

An episode whose environment fails in a way that may pass is a failed sample, and costs no other one.
"""

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from typing import Any, Optional

import torch.distributed as dist

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.datasets.conversations.messages import tools_of
from trainer.datasets.conversations.templates import render_prompt
from trainer.datasets.conversations.turns import check_call_format, continuation_ids
from trainer.datasets.samples.prompts import columns_of
from trainer.distributed.collectives import gather_objects
from trainer.errors import Failed, UserError
from trainer.metrics import counted
from trainer.rollout.engines.sampling import Completion, Sampling, sample_seed
from trainer.rollout.envs.environments import Response, Step, read_opening, read_step, reset
from trainer.rollout.envs.given_messages import GivenMessages, check_new
from trainer.rollout.envs.long_answers import fitting
from trainer.rollout.envs.one_episode import (
    ANSWER,
    DONE,
    LOST,
    TOKENS,
    TURNS,
    Closing,
    Environments,
    Episode,
    Went,
    closed_after_an_error,
)
from trainer.rollout.placement import exchange_objects, share
from trainer.rollout.rewards.reward_functions import check_scores
from trainer.rollout.samples import Sample
from trainer.rollout.timeline import span
from trainer.rollout.user_code import PAUSES, settled

SOON_SECONDS, SOON_SHARE = (
    0.03,
    0.1,
)  # after the first one, episodes that are ready so soon join: of the last generation


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
    return share([episode.as_sample(sampling) for episode in contiguous_slice(episodes, rank_in_engine, per_engine)])


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
    episodes = _play(*asks, alone) if environments.lockstep else _play_freely(*asks)
    return [episode.as_sample(sampling) for episode in episodes]


def _play_freely(
    environments: Environments, engine, asked: list[tuple[int, dict]], sampling: Sampling, seed: int, rollout: int
) -> list[Episode]:
    """Play an episode of each (number, prompt) to its end. Each one goes on when its own step is done.

    The engine continues all episodes that are ready together. Those that are ready soon after the first one belong to
    them: so fast environments have the batches of the lockstep. The random numbers of a turn depend on its episode only.
    """
    call, episodes = environments.call, [Episode(number, prompt) for number, prompt in asked]
    called = {_start(environments, episode): (episode, None) for episode in episodes}
    ready: list[Episode] = []
    closing, patience = Closing(call), SOON_SECONDS
    with closed_after_an_error(call, episodes, called):
        while called or ready:
            first_ready = time.monotonic()
            while called and (not ready or time.monotonic() < first_ready + patience):
                seconds = first_ready + patience - time.monotonic() if ready else None
                for future in call.wait("step", called, FIRST_COMPLETED, seconds):
                    episode, completion = called.pop(future)
                    value = call.value("reset" if completion is None else "step", future)
                    if completion is None:
                        episode.begin(*_opened(environments, episode, value))
                        if isinstance(value, Failed) and episode.tries <= len(PAUSES):
                            closing.add([episode])
                            called[_start(environments, episode)] = (episode, None)
                            continue
                    else:
                        episode.go_on(_stepped(environments, episode, completion, value, sampling))
                    if not episode.over:
                        first_ready = first_ready if ready else time.monotonic()
                        ready.append(episode)
                    else:
                        closing.add([episode])
            if ready:
                ready.sort(key=lambda episode: episode.number)  # whoever was first
                started = time.monotonic()
                for episode, completion in zip(ready, _turns(engine, ready, sampling, seed, rollout)):
                    response = episode.add_turn(environments, completion)
                    called[call.start(functools.partial(episode.env.step, response))] = (episode, completion)
                ready, patience = [], max(SOON_SECONDS, SOON_SHARE * (time.monotonic() - started))
        closing.wait()
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
    with closed_after_an_error(environments.call, episodes):
        opened, _ = exchanged(lambda: _open(environments, episodes))
        for episode, found in zip(episodes, opened):
            episode.begin(*found)
        for _ in range(environments.max_turns):
            going = [episode for episode in episodes if not episode.over]
            completions, problem = [], None
            try:
                completions = _turns(engine, going, sampling, seed, rollout) if going else []
            except UserError as error:
                problem = error
            responses = [e.add_turn(environments, completion) for e, completion in zip(going, completions)]
            answer = functools.partial(_answer, environments, going, completions, responses, sampling)
            answered, any_going = exchanged(answer, problem)
            for episode, found in zip(going, answered):
                episode.go_on(found)
            if not any_going:
                break
    return episodes


def _turns(engine, going: list[Episode], sampling: Sampling, seed: int, rollout: int) -> list[Completion]:
    """The next turn of each episode."""
    texts = [episode.read_ids() for episode in going]
    seeds = [sample_seed(seed, rollout, episode.number, len(episode.turns)) for episode in going]
    room = [sampling.max_new_tokens - len(episode.ids) for episode in going]
    return engine.generate(texts, sampling, seeds, room)


def _start(environments: Environments, episode: Episode) -> Future:
    """Begin the next try of `reset`, after its pause."""
    pause = (0.0, *PAUSES)[episode.tries]
    return environments.call.start(_next_try(environments, episode), pause)


def _next_try(environments: Environments, episode: Episode) -> Callable[[], Any]:
    """A function that makes and resets the environment of an episode. It returns what `reset` gave, for `_opened`."""
    episode.tries += 1
    number, task = episode.tries, copy.deepcopy(columns_of(episode.prompt))  # samples of a prompt share its lists

    def begin() -> Any:
        env = environments.make(task)
        if number == episode.tries:
            episode.env = env
            return reset(env, task)
        if callable(getattr(env, "close", None)):  # made too late: there is another one
            settled(env.close())

    return begin


def _opened(environments: Environments, episode: Episode, opening: Any) -> tuple[list[int], str]:
    """(ids of the prompt, why the episode failed). `opening` is what `reset` gave, or a `Failed`."""
    if isinstance(opening, Failed):
        return [], str(opening)
    with _named(environments, "reset", episode):
        _begin_history(environments, episode, read_opening(opening), opening)
        ids = render_prompt(environments.tokenizer, episode.opening, episode.tools)
    if len(ids) <= environments.prompt_max_len:
        return ids, ""
    where = f"{environments.where}: reset, row {episode.prompt['row'] + 1}"
    allowed = f"up to --prompt_max_len {environments.prompt_max_len}"
    return [], str(Failed(where, f"messages of {counted(len(ids), 'token')}", allowed))


def _begin_history(environments: Environments, episode: Episode, messages: list[dict], given: Any) -> None:
    """Begin a conversation with `messages`, and with the tools that the environment has now. `given` is how it gave them."""
    tools = getattr(episode.env, "tools", None) or columns_of(episode.prompt).get("tools")
    episode.opening, episode.tools = messages, tools_of({"tools": tools})
    episode.given = GivenMessages()
    episode.given.add(given, tools)
    check_call_format(environments.tokenizer, episode.tools)


def _open(environments: Environments, episodes: list[Episode]) -> list[tuple[list[int], str]]:
    """Make and reset an environment for each episode. Returns what `_opened` gives."""
    found, closing, left = {}, Closing(environments.call), episodes
    for pause in (0.0, *PAUSES):
        tries = [_next_try(environments, episode) for episode in left]
        values = environments.call("reset", tries, pause) if tries else []
        found |= {e.number: _opened(environments, e, value) for e, value in zip(left, values)}
        left = [episode for episode, value in zip(left, values) if isinstance(value, Failed)]
        for episode in left:
            episode.failed = found[episode.number][1]
        closing.add(left)
    closing.add(episode for episode in episodes if found[episode.number][1])
    closing.wait()
    return [found[episode.number] for episode in episodes]


def _answer(
    environments: Environments,
    going: list[Episode],
    completions: list[Completion],
    responses: list[Response],
    sampling: Sampling,
) -> list[Went]:
    """Give each response to its environment."""
    values = environments.call("step", [functools.partial(e.env.step, r) for e, r in zip(going, responses)])
    answers = [
        _stepped(environments, episode, completion, value, sampling)
        for episode, completion, value in zip(going, completions, values)
    ]
    closing = Closing(environments.call)
    for episode, went in zip(going, answers):
        if not went.next_ids:
            episode.failed = went.failed
            closing.add([episode])
    closing.wait()
    return answers


def _stepped(
    environments: Environments, episode: Episode, completion: Completion, value: Any, sampling: Sampling
) -> Went:
    """What follows from the `value` that `step` gave."""
    if isinstance(value, Failed):
        return Went([], 0.0, "", {}, str(value))
    with _named(environments, "step", episode):
        step = read_step(value)
        ids, end = [], DONE if step.done else LOST
        try:
            if step.is_history:
                _begin_history(environments, episode, step.messages, value)
            elif step.messages:
                check_new(episode.opening, step.messages)
                episode.given.add(value)
            if step.messages:
                ids, end = _next_ids(environments, episode, completion, step, sampling)
        except UserError:  # the messages are no new ones, or the template refuses them
            if not hasattr(episode.env, "lose"):
                raise
            step, end = episode.env.lose(), LOST  # a sandbox may send anything, and loses its own episode only
    return Went(ids, step.reward, end, _metrics(environments, episode), is_history=step.is_history)


def _next_ids(
    environments: Environments, episode: Episode, completion: Completion, step: Step, sampling: Sampling
) -> tuple[list[int], str]:
    """(ids until the next turn, what ends the episode if there are none)."""
    if not completion.finished:
        return [], TOKENS
    if not episode.response.turns_left:
        return [], TURNS
    last, calls = completion.token_ids[-1], episode.response.tool_calls

    def render(messages: list[dict]) -> list[int]:
        if environments.last_turn_text and episode.response.turns_left == 1:
            *before, message = messages
            messages = [*before, {**message, "content": f"{message['content']}\n\n{environments.last_turn_text}"}]
        if step.is_history:
            return render_prompt(environments.tokenizer, messages, episode.tools)
        return continuation_ids(
            environments.tokenizer,
            episode.opening,
            messages,
            tools=episode.tools,
            call=calls[0]["name"] if calls else None,
            stop_token=last if last in sampling.stop_ids else None,
        )

    room = sampling.max_new_tokens - len(episode.ids)
    long = environments.long_answers
    long = dataclasses.replace(long, max_len=None) if step.is_history else long  # a history is no answer
    ids, was_cut = fitting(render, step.messages, room, long)
    episode.num_cut += was_cut
    return ids, "" if ids else ANSWER


def _metrics(environments: Environments, episode: Episode) -> dict[str, float]:
    """The dict `metrics` of an environment, if it has one: a number for each name. Also how many answers were cut."""
    metrics, own = getattr(episode.env, "metrics", None), {}
    if environments.long_answers.keep != "none":
        own["answers_cut"] = float(episode.num_cut)
    if not isinstance(metrics, dict):
        return own
    _, checked = check_scores(environments.where, ([0.0], metrics), 1)
    return {name: value for name, [value] in checked.items()} | own


@contextlib.contextmanager
def _named(environments: Environments, method: str, episode: Episode):
    """Put the name of the environment, the method and the row in front of an error inside."""
    try:
        yield
    except UserError as error:
        where = f"{environments.where}: {method}, row {episode.prompt['row'] + 1}: {error.where}"
        raise UserError(where.removesuffix(": "), error.found, error.allowed) from None

"""One episode with an environment: how environments are made and called, the tokens so far, and how environments close."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ALL_COMPLETED, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch

from trainer.datasets.conversations.thoughts import opens_thoughts
from trainer.datasets.conversations.tool_formats import tool_calls
from trainer.errors import Failed
from trainer.rollout.engines.sampling import Completion, Sampling
from trainer.rollout.envs.environments import Caller, Response
from trainer.rollout.envs.given_messages import GivenMessages
from trainer.rollout.envs.long_answers import LongAnswers
from trainer.rollout.samples import Sample

THOUGHT_TOKENS = 32  # so many tokens of a header hold the mark that opens thoughts
# what ends an episode: the environment, --env_max_turns, a turn that --generate_max_len cuts, an answer without room, or a
# sandbox that is lost
ENDS = DONE, TURNS, TOKENS, ANSWER, LOST = "done", "turns", "tokens", "answer", "lost"
CLOSE_SECONDS = 10.0  # for environments to close after an error


@dataclass(frozen=True)
class Environments:
    """How a run makes and calls its environments."""

    make: Callable[[dict], Any]  # of a row's columns
    call: Caller
    where: str  # of errors: --env NAME
    tokenizer: Any
    max_turns: int
    prompt_max_len: int
    lockstep: bool = False  # all episodes of a rollout wait for the slowest one after each turn
    long_answers: LongAnswers = LongAnswers()
    last_turn_text: str = ""  # added to the messages that open the last turn


class Went(NamedTuple):
    """How an episode goes on after a turn."""

    next_ids: list[int]  # tokens until the next turn; none at the end of the episode
    reward: float
    end: str  # one of ENDS, if it ends
    metrics: dict[str, float]
    failed: str = ""
    is_history: bool = False  # the tokens begin a new history


@dataclass
class Episode:
    """One environment and the tokens of its conversation so far."""

    number: int
    prompt: dict
    env: Any = None  # only on the rank that calls it, like the next four
    opening: list[dict] = field(default_factory=list)
    tools: Optional[list] = None
    given: GivenMessages = field(default_factory=GivenMessages)
    response: Optional[Response] = None  # the last one
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # after the prompt
    log_probs: list[float] = field(default_factory=list)  # of generated tokens, like kept_ids
    kept_ids: list[list[int]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # as in `Sample`
    versions: list[list[int]] = field(default_factory=list)
    experts: Optional[torch.Tensor] = None  # as in `Sample`
    rewards: list[float] = field(default_factory=list)  # of the turns
    end: str = ""  # one of ENDS
    over: bool = False  # it has ended or failed
    metrics: dict[str, float] = field(default_factory=dict)
    num_cut: int = 0  # answers of which parts were left out; only on the rank that calls it
    tries: int = 0  # of `reset`, so far
    failed: str = ""  # as in `Sample`

    def add_turn(self, environments: Environments, completion: Completion) -> Response:
        """Append the tokens of a turn. Returns the turn as the environment gets it."""
        tokenizer, left = environments.tokenizer, environments.max_turns - len(self.turns) - 1
        raw, start = tokenizer.decode(completion.token_ids), len(self.ids)
        self._add_experts(completion.experts)
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        header = tokenizer.decode(self.read_ids()[-THOUGHT_TOKENS:])
        calls = tool_calls(raw, self.tools, opens_thoughts(header))
        self.response = Response(text, raw, calls, completion.finished, left)
        self.ids += completion.token_ids
        self.turns.append([start, len(self.ids)])
        self.log_probs += completion.log_probs
        self.kept_ids += completion.kept_ids
        self.versions += [[start + at, version] for at, version in completion.versions]
        return self.response

    def _add_experts(self, found: Optional[torch.Tensor]) -> None:
        """Append what a turn `found`, before its tokens are appended: the experts of all tokens that it read.

        A token that an earlier turn read keeps the experts of that turn, since its log-prob came from there.
        """
        if found is None:
            return
        known = found[:0] if self.experts is None else self.experts
        unread = len(self.prompt_ids) + len(self.ids) - len(self.read_ids()) - len(known)
        gap = found.new_full((max(unread, 0), *found.shape[1:]), -1)  # the last token of an older history
        self.experts = torch.cat([known, gap, found[max(-unread, 0) :]])

    def read_ids(self) -> list[int]:
        """The ids that the model reads: those of the newest history."""
        return self.ids[self.starts[-1] :] if self.starts else self.prompt_ids + self.ids

    def go_on(self, went: Went) -> None:
        if went.is_history and went.next_ids:
            self.starts.append(len(self.ids))
        self.end, self.over = went.end, not went.next_ids
        self.rewards.append(went.reward)
        self.ids += went.next_ids
        self.metrics, self.failed = went.metrics, went.failed

    def begin(self, prompt_ids: list[int], failed: str) -> None:
        self.prompt_ids, self.failed, self.over = prompt_ids, failed, bool(failed)

    def as_sample(self, sampling: Sampling) -> Sample:
        """An episode without a turn has failed. Its sample has one token, a stop token, as every sample has a response."""
        stop, is_empty = next(iter(sampling.stop_ids), 0), not self.turns
        return Sample(
            number=self.number,
            row=self.prompt["row"],
            prompt_ids=self.prompt_ids or list(self.prompt["prompt_ids"]),
            response_ids=[stop] if is_empty else self.ids,
            log_probs=[0.0] if is_empty else self.log_probs,
            finished=self.end == DONE,
            label=self.prompt["label"],
            score=math.nan if self.failed else sum(self.rewards),
            metrics=self.metrics,
            kept_ids=[[stop]] if is_empty and sampling.gives_sets else self.kept_ids,
            turns=[[0, 1]] if is_empty else self.turns,
            starts=self.starts,
            turn_rewards=[0.0] if is_empty else self.rewards,
            versions=self.versions,
            experts=self.experts,
            failed=self.failed,
            end=self.end,
        )


class Closing:
    """Environments that close while others go on."""

    def __init__(self, call: Caller):
        self._call, self._futures = call, {}  # whether the episode had gone well, by future

    def add(self, episodes: Iterable[Episode]) -> None:
        """Begin to close the environments of these episodes."""
        for episode in episodes:
            env, episode.env = episode.env, None
            if callable(getattr(env, "close", None)):
                self._futures[self._call.start(env.close)] = not episode.failed

    def wait(self, seconds: Optional[float] = None) -> None:
        """Wait until all of them have closed, or at most for `seconds`, and then without errors.

        Raises UserError if `close` failed after an episode that went well. One that may pass is printed.
        """
        left = {*self._futures}
        while left:
            left -= self._call.wait("close", left, ALL_COMPLETED, seconds)
            if seconds is not None:
                return
        for value in [self._call.value("close", future) for future, well in self._futures.items() if well]:
            if isinstance(value, Failed):
                print(f"warning: {value}", flush=True)


@contextlib.contextmanager
def closed_after_an_error(call: Caller, episodes: list[Episode], called: Iterable[Future] = ()) -> Iterator[None]:
    """After an error inside, close what is open. Of the calls `called`, those that have not begun do not."""
    try:
        yield
    except BaseException:
        for future in called:
            future.cancel()
        closing = Closing(call)
        closing.add(episodes)
        closing.wait(CLOSE_SECONDS)
        raise

"""Environments of the user: where their code comes from, how it is called, and what it may return.

Every failure of that code becomes one UserError, as with reward functions. One that may pass becomes a `Failed`.
"""

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ALL_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Optional

import yaml

from trainer.comma_separated import named_in
from trainer.datasets.conversations.messages import messages_of
from trainer.errors import Failed, UserError
from trainer.flags.parse_flags import read_yaml
from trainer.rollout.rewards.reward_functions import check_scores
from trainer.rollout.user_code import describe_error, import_code, is_passing

FLAG = "--env"
NAMES = ("Environment", "make_environment")  # a file or module has one of them
SPARE_SECONDS = 5.0  # after the limit of a call, the loop that runs all of them counts as blocked


class Response(str):
    """The text of a turn without special tokens, and further facts about the turn."""

    raw: str  # with special tokens
    tool_calls: list[dict]  # [{"name": ..., "arguments": {...}}], a malformed one with an "error" and no arguments
    finished: bool  # whether a stop token or stop text ended the turn, not the limit of tokens
    turns_left: int  # turns that the model may still have: with 1, the answer to this one opens the last turn

    def __new__(cls, text: str, raw: str, tool_calls: list[dict], finished: bool, turns_left: int = 0):
        self = super().__new__(cls, text)
        self.raw, self.tool_calls, self.finished, self.turns_left = raw, tool_calls, finished, turns_left
        return self


@dataclass
class Step:
    """What an environment answers: the next messages, or the end."""

    messages: list[dict] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    is_history: bool = False  # the messages are the whole conversation from here on


class History(list):
    """Messages of `step` that replace the conversation so far, turns of the assistant included.

    The model reads them as it reads those of `reset`. So an environment shortens a long history, or asks a sub-agent.
    """


@functools.cache  # the code of a module runs once
def load_environment(name: str) -> Callable[[], Any]:
    """The class or function of `--env` that makes an environment. Raises UserError if there is none.

    `name` is a Python file or a module, and may end with :NAME.
    """
    source, _, wanted = name.partition(":")
    module = import_code(source, FLAG)
    names = [wanted] if wanted else NAMES
    factory = next((vars(module)[n] for n in names if callable(vars(module).get(n))), None)
    if factory is None:
        raise UserError(
            FLAG, f"{source} has no {' or '.join(names)}", "a class, or a function that makes an environment"
        )
    missing = [method for method in ("reset", "step") if inspect.isclass(factory) and not hasattr(factory, method)]
    if missing:
        raise UserError(FLAG, f"{name} has no method {missing[0]}", "reset(task) and step(response)")
    return factory


@dataclass(frozen=True)
class Source:
    """One environment of --env: where its code is, and the arguments of its constructor."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        return load_environment(self.name)(**self.arguments)

    def check(self) -> None:
        """Raises UserError if the code cannot be loaded, or does not take the arguments."""
        factory = load_environment(self.name)
        try:
            inspect.signature(factory).bind(**self.arguments)
        except TypeError as error:
            raise UserError(f"{FLAG} {self.name}", f"--env_args: {error}", "the arguments of its constructor") from None
        except ValueError:  # a class that is not written in Python
            pass


def read_sources(env: str, env_args: Optional[str], by_name: bool) -> dict[str, Source]:
    """{NAME: environment} of --env NAME=FILE,NAME=FILE with `by_name`; else {"": environment}.

    Raises UserError if --env or --env_args has another form.
    """
    names = {"": env}
    if by_name:
        names = named_in(env, FLAG, "NAME=FILE, or several of different names (comma-separated), for --env_key")
    arguments = _mapping(env_args) if env_args else {}
    if not by_name:
        return {"": Source(env, arguments)}
    if unknown := arguments.keys() - names:
        raise UserError("--env_args", f"no environment {min(unknown)} in --env", ", ".join(names))
    return {name: Source(source, _checked(name, arguments.get(name) or {})) for name, source in names.items()}


def _mapping(text: str) -> dict[str, Any]:
    """A mapping in YAML or JSON, with values that JSON has too."""
    try:
        value = read_yaml(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            "--env_args", f"{text}: {' '.join(str(error).split())}", "a mapping such as '{limit: 3}'"
        ) from None
    return _checked("", value)


def _checked(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError("--env_args", f"{name + ': ' if name else ''}{value}", "a mapping such as '{limit: 3}'")
    return value


class Caller:
    """Calls functions of environments: plain ones in threads, async ones in one event loop of the process.

    At most `concurrency` run at a time, each for at most `timeout` seconds. A plain one that is too late holds up no other.
    """

    def __init__(self, where: str, timeout: float, concurrency: int):
        self._where, self._timeout, self._concurrency = where, timeout, concurrency
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._starting = threading.Lock()

    def __call__(self, what: str, functions: list[Callable[[], Any]], pause: float = 0.0) -> list:
        """The results of `functions`, in order, as `value` gives them. They start after `pause` seconds.

        Raises UserError as `value` and `wait`. `what` names the function there.
        """
        futures = [self.start(function, pause) for function in functions]
        left = set(futures)
        while left:
            left -= self.wait(what, left, ALL_COMPLETED)
        return [self.value(what, future) for future in futures]

    def start(self, function: Callable[[], Any], pause: float = 0.0) -> Future:
        """Call `function` after `pause` seconds, as soon as there is room. For `wait` and `value`."""
        with self._starting:
            if self._loop is None:
                self._loop, self._room = asyncio.new_event_loop(), asyncio.Semaphore(self._concurrency)
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._one(function, pause), self._loop)

    def wait(self, what: str, futures: Collection[Future], until: str, seconds: Optional[float] = None) -> set[Future]:
        """The futures that have ended, after `until` of concurrent.futures, or after `seconds`.

        Raises UserError if the loop stands still for the limit of a call: an async function that never waits blocks it.
        """
        while True:
            beat = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
            done, _ = wait(futures, self._timeout + SPARE_SECONDS if seconds is None else seconds, until)
            if done or seconds is not None:
                return done
            if not beat.done():
                raise self._error(what, self._late())

    def value(self, what: str, future: Future) -> Any:
        """The result of a call that has ended, or a `Failed` if it may go well the next time, as any `reset` may.

        Raises UserError if the user's code failed in another way.
        """
        value = future.result()
        if not isinstance(value, Failure):
            return value
        if value.passing or what == "reset":
            return self._error(what, value, Failed)
        raise self._error(what, value)

    def _error(self, what: str, failure: "Failure", kind: type[UserError] = UserError) -> UserError:
        return kind(self._where, f"{what}{failure.found}", failure.allowed)

    def _late(self) -> "Failure":
        found, allowed = f": no result after {self._timeout:g} s", "a faster environment, or a longer --env_timeout"
        return Failure(found, allowed, passing=True)

    async def _one(self, function: Callable[[], Any], pause: float) -> Any:
        await asyncio.sleep(pause)
        async with self._room:
            try:
                async with asyncio.timeout(self._timeout):
                    value = await self._in_thread(function)
                    return await _awaited(value) if inspect.isawaitable(value) else value
            except TimeoutError:
                return self._late()
            except asyncio.CancelledError as error:  # by the user's code
                return Failure.of(error)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Call `function` in a thread of its own. One that never returns dies with the process."""
        result = self._loop.create_future()

        def run() -> None:
            value = _guarded(function)
            self._loop.call_soon_threadsafe(lambda: result.done() or result.set_result(value))

        threading.Thread(target=run, daemon=True).start()
        return await result


@dataclass
class Failure:
    """Replaces a result: what went wrong in the user's code, which may raise anything, and call sys.exit()."""

    found: str
    allowed: str = ""
    passing: bool = False  # whether the next call may go well

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        return cls(f" raised {describe_error(error)}", passing=is_passing(error))


def _guarded(function: Callable) -> Any:
    try:
        return function()
    except BaseException as error:
        return Failure.of(error)


async def _awaited(value) -> Any:
    try:
        return await value
    except asyncio.CancelledError:  # at the time limit
        raise
    except BaseException as error:
        return Failure.of(error)


def reset(env: Any, task: dict) -> Any:
    """Call `reset(task)`, or `reset(options=task)` if the environment has Gymnasium's form."""
    options = inspect.signature(env.reset).parameters.get("options")
    if options is not None and options.kind is options.KEYWORD_ONLY:
        return env.reset(options=task)
    return env.reset(task)


def read_opening(value: Any) -> list[dict]:
    """The messages that `reset` returned, or Gymnasium's (observation, info). Raises UserError for anything else."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = _observed(value[0])
    messages = _messages(value)
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError("", "the messages do not end with one that the model answers", "a list of messages")
    return messages


def read_step(value: Any) -> Step:
    """What `step` returned: messages; (messages, reward); (reward, done); or (messages, reward, done).

    A `History` may be in place of the messages. Gymnasium's (observation, reward, terminated, truncated, info) is read too.
    Raises UserError for anything else. A `Step` without messages ends an episode that is not done.
    """
    if isinstance(value, Step):
        return value
    given = value
    if isinstance(value, tuple) and len(value) == 5:
        observation, reward, terminated, truncated, _ = value
        value = (_observed(observation), reward, bool(terminated or truncated))
    if isinstance(value, list):
        value = (value, 0.0, False)
    elif isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], list):
        value = (None, *value)
    elif isinstance(value, tuple) and len(value) == 2 and not _is_truth(value[1]):  # (messages, done) has no reward
        value = (*value, False)
    if not (isinstance(value, tuple) and len(value) == 3 and _is_truth(value[2])):
        found = f"returned {type(given).__name__} {' '.join(str(given).split())[:60]}"
        raise UserError("", found, "messages, (messages, reward), (reward, done), or (messages, reward, done)")
    messages, reward, done = value
    [reward], _ = check_scores("reward", [reward], 1)
    if done:
        return Step(reward=reward, done=True)
    if isinstance(messages, History):
        return Step(read_opening(list(messages)), reward, is_history=True)
    messages = _messages(messages) if messages else []
    if any(message["role"] == "assistant" for message in messages):
        raise UserError(
            "", "gives a message of the assistant", "only new messages, of the roles user and tool, or a History"
        )
    if not messages:
        raise UserError("", "is not done and gives no messages for the model", "messages of the roles user and tool")
    return Step(messages, reward)


def _is_truth(value: Any) -> bool:
    """Whether this is True or False, also of numpy. The number 1.0 is a reward at the place of `done`."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def _observed(observation: Any) -> list[dict]:
    return [{"role": "user", "content": str(observation)}]


def _messages(value: Any) -> list[dict]:
    return messages_of(value, "messages")

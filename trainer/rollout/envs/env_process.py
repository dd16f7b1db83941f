"""--env_sandbox and --env_container: each environment in a sandbox of its own, as the trainer sees it.

The process may be killed, or hang, or send anything. That ends its episode and nothing else: such an episode is *lost*,
and counted. Answers are JSON with a deadline, a limit of bytes and a checked form.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

from trainer.datasets.conversations.messages import tools_of
from trainer.errors import UserError
from trainer.limits import MB, limit
from trainer.rollout.envs.container import FLAG
from trainer.rollout.envs.container import bear as bear_in
from trainer.rollout.envs.environments import Failure, History, Response, Source, Step, read_opening, read_step
from trainer.rollout.envs.nursery import Born, Nursery
from trainer.rollout.envs.sandbox import Box
from trainer.rollout.peers import BadAnswer, read_frame, read_metrics, read_object, send_frame
from trainer.rollout.rewards.reward_functions import check_scores
from trainer.rollout.user_code import describe_error

LOST = {"lost": 1.0}  # a metric of every such environment
SHOWN_ERROR = 500  # characters of an error of an environment
PROBE_SECONDS = 120.0


class ProcessEnvironment:
    """An environment of `--env`, with `reset`, `step` and `close`. Its process begins at `reset`."""

    def __init__(
        self, source: Source, memory_mb: int, timeout: float, box: Optional[Box] = None, container: Sequence[str] = ()
    ):
        """`timeout` is for a whole call, in seconds. `box` has further limits; its memory is `memory_mb`.

        `container` is a command that starts the process, in place of a sandbox with these limits.
        """
        own = {"memory_mb": memory_mb}
        self._box = Box(**((vars(box) if box else {}) | own))
        self._source, self._timeout, self._container = source, timeout, container
        self._process: Optional[Born] = None
        self.tools: Optional[list] = None
        self.metrics: dict[str, float] = {"lost": 0.0}

    def reset(self, task: dict) -> Any:
        """The first messages, or a `Failure`. The caller tries it again."""
        answer = self._begin(task, time.monotonic() + self._timeout)
        if answer is None:
            return Failure(" lost its process, or took too long", "a larger --env_memory_mb or --env_timeout")
        if "error" in answer:
            return Failure(answer["error"])
        self.tools = answer["tools"]
        return answer["messages"]

    def _begin(self, task: dict, deadline: float) -> Optional[dict]:
        """The answer of a new process to `reset`, or None if it is lost."""
        self.close()
        try:
            self._process = born(self._source, self._box, self._container)
        except (OSError, ValueError):  # somebody killed the nursery; the next one is new
            return None
        return self._ask({"reset": task}, deadline, _read_opening)

    def step(self, response: Response) -> Any:
        """What the environment's `step` gave, or the end of the episode if the process is lost."""
        asked = {"text": str(response), "raw": response.raw, "calls": response.tool_calls}
        request = {"step": {**asked, "finished": response.finished, "turns_left": response.turns_left}}
        answer = self._ask(request, time.monotonic() + self._timeout, _read_step)
        if answer is None:
            return self.lose()
        if "error" in answer:
            return Failure(answer["error"], passing=answer["passing"])
        self.metrics |= answer["metrics"]
        self.tools = answer.get("tools", self.tools)
        return answer["messages"], answer["reward"], answer["done"]

    def lose(self) -> Step:
        """Count this episode as lost, and end it. The rewards so far stay."""
        self.metrics |= LOST
        self.close()
        return Step()

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ask(self, request: dict, deadline: float, read: Callable[[dict], dict]) -> Optional[dict]:
        """The answer in its checked form, or None if the process is gone, late, or answers anything else."""
        try:
            if self._process is not None:
                send_frame(self._process.connection, json.dumps(request, default=str).encode(), deadline)
                answer = read_object(read_frame(self._process.connection, deadline))
                if isinstance(answer.get("error"), str):
                    shown = "".join(c for c in answer["error"] if c.isprintable())[:SHOWN_ERROR]
                    return {"error": shown, "passing": answer.get("passing") is True}
                return read(answer)
        except (OSError, EOFError, BadAnswer, UserError, KeyError, TypeError, ValueError, AttributeError):
            pass
        self.close()
        return None


def _read_opening(answer: dict) -> dict:
    messages = read_opening(_of_bounded_size(answer["messages"]))
    return {"messages": messages, "tools": tools_of({"tools": _of_bounded_size(answer["tools"])})}


def _read_step(answer: dict) -> dict:
    messages, reward, done = _of_bounded_size(answer["messages"]), answer["reward"], answer["done"]
    if type(done) is not bool or isinstance(reward, bool) or not isinstance(reward, (int, float)):
        raise BadAnswer("reward is no number, or done is neither true nor false")
    check_scores("reward", [reward], 1)
    own = {}
    if messages or not done:
        is_history = "history_tools" in answer
        step = read_step((History(messages) if is_history else messages, reward, done))
        messages, reward, done = step.messages, step.reward, step.done
        if is_history:
            messages, own = History(messages), {"tools": tools_of({"tools": _of_bounded_size(answer["history_tools"])})}
    metrics = read_metrics(answer["metrics"])
    return {"messages": messages, "reward": float(reward), "done": done, "metrics": metrics, **own}


def _of_bounded_size(value: Any) -> Any:
    """A part of an answer that becomes tokens, which take far more memory than its text."""
    if len(json.dumps(value, ensure_ascii=False)) > limit("text_mb") * MB:
        raise BadAnswer(f"more than {limit('text_mb')} million characters of text")
    return value


def born(source: Source, box: Box, container: Sequence[str]) -> Born:
    """The new process of an environment. Raises OSError or ValueError if it cannot be started."""
    return bear_in(container, source) if container else Nursery.here().bear(source, box)


def check_sandbox(source: Source, box: Box, container: Sequence[str] = ()) -> None:
    """Start one sandbox, and make the environment in it. Raises UserError where either fails, in one line."""
    try:
        process = born(source, box, container)
        try:
            deadline = time.monotonic() + PROBE_SECONDS
            send_frame(process.connection, b'{"probe": true}', deadline)
            answer = read_object(read_frame(process.connection, deadline))
        finally:
            process.end()
    except (OSError, EOFError, ValueError) as error:
        if container:
            found = f"{container[0]} starts no environment ({describe_error(error)}); what it printed is above"
            raise UserError(FLAG, found, "a command that runs the Python that follows it, with the trainer") from None
        found = f"the process of {source.name} is lost before its first answer ({type(error).__name__})"
        raise UserError("--env_sandbox", found, "a larger --env_memory_mb") from None
    if "parts" in answer:
        raise UserError(*answer["parts"])
    if "error" in answer:
        raise UserError(f"--env {source.name}", answer["error"].strip())

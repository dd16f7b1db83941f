"""Environments of OpenEnv (package `openenv-core`, extra `openenv`): a client that plays on their server.

Each episode has a client, and so a session, of its own. What a server answers is checked here. A wrong answer, a server
that is gone and one that is too slow cost the episode.
"""

import asyncio
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Optional

from trainer.errors import UserError
from trainer.rollout.envs.tool_env import FLAG, opening_of
from trainer.rollout.peers import answer_bytes, read_object

try:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
except ImportError:  # an optional extra
    raise UserError(
        "trainer.rollout.envs.openenv_env", "openenv-core is not installed", "pip install -e '.[openenv]'"
    ) from None

NOT_SHOWN = ("done", "reward", "metadata")  # fields of every observation


def text_of(observation: Any) -> str:
    """An observation as the model reads it: its only field, or a line `name: value` for each one that is not None."""
    if isinstance(observation, CallToolObservation):
        fault = observation.error
        return _text(observation.result) if fault is None else f"error: {fault.message}"
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump()
    elif dataclasses.is_dataclass(observation):
        observation = dataclasses.asdict(observation)
    if not isinstance(observation, dict):
        return _text(observation)
    shown = {name: _text(observation[name]) for name in observation if name not in NOT_SHOWN}
    shown = {name: text for name, text in shown.items() if observation[name] is not None}
    return "".join(shown.values()) if len(shown) < 2 else "\n".join(f"{name}: {text}" for name, text in shown.items())


def _text(value: Any) -> str:
    """A text as it is, the texts of a result of MCP, and anything else as JSON."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        texts = [part["text"] for part in value["content"] if part.get("type") == "text"]
        value = "\n".join(texts) if texts else value.get("structured_content")
    return value if isinstance(value, str) else json.dumps(value, default=str)


def opening_with(task: dict, text: str) -> list[dict]:
    """The first messages: those of the row, as `opening_of` gives them, and then what `reset` showed."""
    messages = opening_of(task)
    if not text:
        return messages
    *before, last = messages
    if last["role"] != "user" or not isinstance(last["content"], str):
        return [*messages, {"role": "user", "content": text}]
    return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]


class OpenEnvEnvironment:
    """One episode of an environment. Without an `action`, the calls of the model are its actions, by MCP."""

    def __init__(self, client: EnvClient, action: Optional[Callable], reward: Optional[Callable], *texts: Callable):
        self._client, self._action, self._reward = client, action, reward
        self._opening, self._show = texts
        self.tools: Optional[list[dict]] = None
        self.metrics = {} if action else {"tool_calls": 0.0, "tool_errors": 0.0}

    async def reset(self, task: dict) -> list[dict]:
        self._task = task
        if self._action is None:  # before the reset, as it is a step
            try:
                self.tools = [_schema(tool) for tool in await self._client.list_tools()]
            except Exception as error:  # as in `_answer`
                raise _lost(error) from None
        seed = zlib.crc32(json.dumps(task, sort_keys=True, default=str).encode()) >> 1  # 31 bits
        columns = {name: value for name, value in task.items() if value is not None}
        result, text = await self._answer(self._client.reset(**{"seed": seed, **columns}))
        if result.done:
            raise ConnectionError("the OpenEnv server ended the episode in reset")
        self._first_reward = result.reward
        return self._opening(task, text)

    async def step(self, response: Any) -> Any:
        """Raises ConnectionError for anything but a right answer."""
        total, self._first_reward = self._first_reward, 0.0
        if self._action is not None:
            result, text = await self._answer(self._client.step(self._action(response)))
            total += result.reward
            return (total, True) if result.done else ([{"role": "user", "content": text}], total)
        if not response.tool_calls:
            return total + (float(self._reward(self._task, str(response))) if self._reward else 0.0), True
        messages = []
        for call in response.tool_calls:
            fault = call.get("error")  # of a malformed call, which the model reads
            text, failed, done = f"error: {fault}", True, False
            if not fault:
                action = CallToolAction(tool_name=call["name"], arguments=call["arguments"])
                result, text = await self._answer(self._client.step(action))
                total, done = total + result.reward, result.done
                failed = getattr(result.observation, "error", None) is not None
            self.metrics["tool_calls"] += 1
            self.metrics["tool_errors"] += failed
            if done:
                return total, True
            messages.append({"role": "tool", "name": call["name"] or "tool", "content": text})
        return messages, total

    async def close(self) -> None:
        """End the session."""
        try:
            await self._client.close()
        except Exception as error:  # a warning: the episode has ended
            raise _lost(error) from None

    async def _answer(self, asked: Awaitable[StepResult]) -> tuple[StepResult, str]:
        """(a checked result, its observation as a text)."""
        try:
            result = await asked
            reward = 0.0 if result.reward is None else float(result.reward)
            if not math.isfinite(reward) or not isinstance(result.done, bool):
                raise ValueError(f"reward {result.reward}, done {result.done}")
            text = "" if result.done else self._show(result.observation)
            return dataclasses.replace(result, reward=reward), text
        except Exception as error:  # of the connection, of the server, or of a client that cannot read the answer
            raise _lost(error) from None


def _lost(error: Exception) -> ConnectionError:
    return ConnectionError(f"OpenEnv: {type(error).__name__}: {' '.join(str(error).split())}")


def limited(client: EnvClient) -> EnvClient:
    """The client with our limits: of bytes, of values, and of the form, before it makes objects of an answer.

    The package asks for its own limit of bytes at its constructor, which is called in the file of --env.
    """
    client._max_message_size = min(client._max_message_size, answer_bytes())
    client._receive = functools.partial(_receive, client)
    return client


async def _receive(client: EnvClient) -> dict:
    async with asyncio.timeout(client._message_timeout):
        answer = await client._ws.recv()
    return read_object(answer.encode() if isinstance(answer, str) else answer)


def _schema(tool: Any) -> dict:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def from_openenv(
    make_client: Callable[[], EnvClient],
    action: Optional[Callable[[Any], Any]] = None,
    reward: Optional[Callable[[dict, str], float]] = None,
    opening: Callable[[dict, str], list[dict]] = opening_with,
    show: Callable[[Any], str] = text_of,
) -> Callable[[], OpenEnvEnvironment]:
    """What `--env` needs for an environment of OpenEnv:
    `make_environment = from_openenv(lambda: GameEnv(base_url="http://localhost:8000"), lambda text: Move(text=text))`.

    `make_client()` gives a client that is not connected. `action(response)` makes the environment's action of a turn, and
    `show(observation)` a text. `opening(task, text)` gives the first messages; `text` is the observation of `reset`.
    Without `action`, the environment is one with MCP tools: calls are its actions. A turn without a call ends the episode,
    and `reward(task, answer)` scores it. Raises UserError for a reward with an action.
    """
    if action is not None and reward is not None:
        raise UserError(FLAG, "from_openenv with an action and a reward", "only an action: the environment scores it")

    def make() -> OpenEnvEnvironment:
        client = make_client()
        client = getattr(client, "async_client", client)  # of client.sync()
        if action is None and not hasattr(client, "list_tools"):
            raise UserError(
                FLAG, f"from_openenv: {type(client).__name__} lists no tools", "action=, or an MCPToolClient"
            )
        return OpenEnvEnvironment(
            limited(client) if isinstance(client, EnvClient) else client, action, reward, opening, show
        )

    return make

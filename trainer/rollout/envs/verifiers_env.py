"""Environments of the package `verifiers` (its API up to 0.1: `load_environment`, rollouts by an OpenAI client).

Such an environment asks a client for the model's turns. Here, the client waits until the trainer has a turn. So the
environment runs unchanged, in its own task. `reset` and `step` run between its requests.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, Optional

from openai.types.chat import ChatCompletion


class VerifiersEnvironment:
    """One episode of `env`, a `verifiers.Environment`, with `reset`, `step` and `close`."""

    def __init__(self, env: Any):
        self._env, self.tools = env, getattr(env, "oai_tools", None) or None
        self.metrics: dict[str, float] = {}
        self._requests: asyncio.Queue = asyncio.Queue()
        self._seen: list[dict] = []  # the messages of the last request
        self._turn: Optional[asyncio.Future] = None  # the answer that the environment waits for
        self._episode: Optional[asyncio.Task] = None
        self.chat = self.completions = self  # the environment calls client.chat.completions.create

    async def create(self, *, messages: list[dict], **_options) -> ChatCompletion:
        """The model's next turn. Only the environment calls it."""
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(messages)
        return await self._turn

    async def reset(self, task: dict) -> list[dict]:
        self._episode = asyncio.ensure_future(self._play(task))
        return await self._request()

    async def step(self, response: Any) -> Any:
        """Raises what the environment raised, or ValueError if it changed messages of earlier turns."""
        self._turn.set_result(as_completion(response, len(self._seen)))
        seen, found = self._seen, await self._request()
        if found is None:
            state = self._episode.result()
            self.metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
            return float(state["reward"]), True
        if found[: len(seen)] != seen or found[len(seen)]["role"] != "assistant":
            raise ValueError("the environment changes earlier messages, and tokens that were trained cannot change")
        return found[len(seen) + 1 :]

    async def close(self) -> None:
        """End an episode that a limit has stopped."""
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._episode

    async def _play(self, task: dict) -> dict:
        limit = contextlib.nullcontext()
        inputs = {"example_id": 0, **task}
        state = await self._env.run_rollout(inputs, self, "policy", {}, limit, limit, score=True)
        if state["error"] is not None:
            raise state["error"]
        return state

    async def _request(self) -> Optional[list[dict]]:
        """The messages of the next request, or None at the end of the episode."""
        asked = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([asked, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._episode.result()  # raises what the environment raised
            return None
        self._seen = list(asked.result())
        return self._seen


def as_completion(response: Any, number: int) -> ChatCompletion:
    """A turn in the form of OpenAI's API."""
    calls = [
        {
            "id": f"call{number:03d}{place:02d}",
            "type": "function",
            "function": {"name": call["name"] or "tool", "arguments": json.dumps(call["arguments"])},
        }
        for place, call in enumerate(response.tool_calls)
    ]
    message = {"role": "assistant", "content": str(response), "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": "stop" if response.finished else "length", "message": message}
    return ChatCompletion(
        id="policy", object="chat.completion", created=0, model="policy", choices=[{**choice, "logprobs": None}]
    )


def from_verifiers(env: Any) -> Callable[[], VerifiersEnvironment]:
    """What `--env` needs of an environment of `verifiers`: `make_environment = from_verifiers(load_environment(...))`."""
    return lambda: VerifiersEnvironment(env)

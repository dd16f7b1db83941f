"""Environments of the package `verifiers` (its API v1): they ask an endpoint of OpenAI's form for the model's turns.

Here, the trainer is that endpoint, and a request waits until the trainer has a turn. So an environment runs unchanged, with
its own programs, tools and rewards, in a task of the event loop. `reset` and `step` run between its requests.
"""

import asyncio
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Optional

from trainer.errors import UserError
from trainer.rollout.peers import BadAnswer, answer_bytes, read_object

CURE = "pip install 'verifiers==0.4.*'"
try:
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.clients.client import SESSION_ID_HEADER
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.interception import server as their_server
except ImportError:
    try:
        found = f"verifiers {version('verifiers')} has another API"
    except PackageNotFoundError:
        found = "verifiers is not installed"
    raise UserError("trainer.rollout.envs.verifiers_env", found, CURE) from None

PATH = "/v1/chat/completions"
# Keys of a request that the trainer answers. It samples by its own flags, so others are named.
ANSWERED = {"model", "messages", "tools", "stream", "stream_options", "parallel_tool_calls"}
TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")  # of an agent
# Errors of places and connections cost an episode. Others are faults of the environment, and end the run.
PASSING = {"SandboxError", "TunnelError", "InterceptionError", "ProviderError", "HarnessError", "ToolsetError"}


class Endpoint:
    """The endpoint of all episodes in one event loop, and what these share. Both last as long as an episode is open."""

    def __init__(self, env: vf.Env):
        self.env, self.episodes = env, {}  # the (trace, episode) of each id of a trace
        self._open, self._changing, self._named = 0, asyncio.Lock(), set()

    async def enter(self) -> vf.ModelContext:
        """The model and client for an episode that opens."""
        async with self._changing:
            if not self._open:
                self._ready, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
                self._service = asyncio.ensure_future(self._serve())
                try:
                    await asyncio.wait([self._ready, self._service], return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    self._service.cancel()
                    await asyncio.gather(self._service, return_exceptions=True)
                    raise
                if self._service.done():
                    self._service.result()  # raises why it could not begin
            self._open += 1
            return self._ready.result()

    async def leave(self, episode: "VerifiersEnvironment") -> None:
        """After an episode."""
        for key in [key for key, (_, other) in self.episodes.items() if other is episode]:
            del self.episodes[key]
        async with self._changing:
            self._open -= 1
            if not self._open:
                self._over.set()
                await self._service

    async def _serve(self) -> None:
        their_server.MAX_REQUEST_BODY = answer_bytes()  # of the package's server, before it; a gigabyte otherwise
        app = web.Application(client_max_size=answer_bytes())
        app.router.add_post(PATH, self._answer)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            await self._check_network(port)
            url = f"http://127.0.0.1:{port}/v1"
            async with self.env.serving():
                client = vf.EvalClientConfig(base_url=url, api_key_var="TRAINER_HAS_NO_KEY")
                self._ready.set_result(vf.ModelContext(model="policy", client=client))
                await self._over.wait()
        finally:
            await runner.cleanup()

    async def _check_network(self, port: int) -> None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            found = f"programs of verifiers cannot reach the trainer ({error}), as with --env_sandbox: remove the flag"
            raise RuntimeError(found) from None
        writer.close()

    async def _answer(self, request: web.Request) -> web.Response:
        trace, episode = self.episodes.get(request.headers.get(SESSION_ID_HEADER), (None, None))
        if episode is None:
            return web.json_response({"error": {"message": "the episode is over"}}, status=404)
        try:
            body = read_object(await request.read())
            if not isinstance(body.get("messages"), list):
                raise BadAnswer("no list of messages")
        except (BadAnswer, web.HTTPRequestEntityTooLarge) as error:
            episode.lose(f"its request is refused: {error}")
            return web.json_response({"error": {"message": str(error)}}, status=400)
        self._name_others(body)
        completion = await episode.ask(trace, body)
        if completion is None:
            return web.json_response({"error": {"message": "the trainer refuses this episode"}}, status=400)
        if not body.get("stream"):
            return web.json_response(completion)
        events = f"data: {json.dumps(as_chunk(completion))}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    async def _refuse(self, request: web.Request) -> web.Response:
        _, episode = self.episodes.get(request.headers.get(SESSION_ID_HEADER), (None, None))
        if episode is not None:
            episode.refuse(f"its harness asks for {request.path}, and the trainer answers {PATH}: use another harness")
        return web.json_response({"error": {"message": f"only {PATH}"}}, status=404)

    def _name_others(self, body: dict) -> None:
        usual = {"n": 1, "tool_choice": "auto"}
        others = {key for key, value in body.items() if key not in ANSWERED and value not in (None, usual.get(key))}
        if new := sorted(others - self._named):
            self._named |= others
            print(f"warning: --env: requests set {', '.join(new)}; the trainer samples by its own flags", flush=True)


class VerifiersEnvironment:
    """One episode at `endpoint`, with `reset`, `step` and `close`."""

    def __init__(self, endpoint: Callable[[], Endpoint]):
        self._make_endpoint, self._endpoint = endpoint, None
        self.tools: Optional[list[dict]] = None
        self.metrics: dict[str, float] = {}
        self._requests: asyncio.Queue = asyncio.Queue()  # bodies of requests, or why one is refused
        self._seen: Optional[vf.Request] = None  # the last request
        self._turn: Optional[asyncio.Future] = None  # the answer that the environment waits for
        self._trace: Optional[vf.Trace] = None  # of the agent that is trained
        self._episode: Optional[asyncio.Task] = None

    async def ask(self, trace: vf.Trace, body: dict) -> Optional[dict]:
        """The model's next turn, or None if the request is refused. Only the endpoint calls it."""
        name = trace.agent.name or "agent"
        if not trace.agent.trainable:
            return self.refuse(f"its agent {name} is not trained, and asks the trainer: give it a client of its own")
        if trace is not (self._trace or trace):
            return self.refuse("the model plays two agents, or one twice, and only one conversation is trained")
        if self._turn is not None and not self._turn.done():
            return self.refuse("it asks for two turns at once")
        self._trace, self._turn = trace, asyncio.get_running_loop().create_future()
        self._requests.put_nowait(body)
        return await self._turn

    def refuse(self, why: str) -> None:
        """End the episode with an error."""
        self._requests.put_nowait(ValueError(f"the environment cannot be trained: {why}"))

    def lose(self, why: str) -> None:
        """End the episode, and only it."""
        self._requests.put_nowait(ConnectionError(why))

    async def reset(self, task: dict) -> list[dict]:
        endpoint = self._make_endpoint()
        context = await endpoint.enter()
        self._endpoint = endpoint
        self._episode = asyncio.ensure_future(self._play(task, context))
        body = await self._request()
        if body is None:
            raise ValueError("the environment ends without a request: its trained agent must have no client of its own")
        self._seen, self.tools = ChatDialect().parse_request(body), body.get("tools")
        return body["messages"]

    async def step(self, response: Any) -> Any:
        """Raises what the environment raised, or ValueError if it changed messages of earlier turns."""
        completion, seen = as_completion(response, len(self._seen.messages)), self._seen
        if not self._turn.done():
            self._turn.set_result(completion)
        body = await self._request()
        if body is None:
            return self._score(), True
        self._seen, number = ChatDialect().parse_request(body), len(seen.messages)
        own = ChatDialect().parse_request({"messages": [completion["choices"][0]["message"]]}).messages
        if [_plain(m) for m in self._seen.messages[: number + 1]] != [_plain(m) for m in [*seen.messages, *own]]:
            raise ValueError("the environment changes earlier messages, and tokens that were trained cannot change")
        if self._seen.tools != seen.tools:
            raise ValueError("the environment changes its tools, and tokens that were trained cannot change")
        return body["messages"][number + 1 :]

    async def close(self) -> None:
        """End an episode that a limit has stopped."""
        if self._endpoint is None:
            return
        endpoint, self._endpoint = self._endpoint, None
        try:
            self._episode.cancel()
            await asyncio.gather(self._episode, return_exceptions=True)
            if self._turn is not None:
                self._turn.cancel()
        finally:
            await endpoint.leave(self)

    async def _play(self, row: dict, context: vf.ModelContext) -> None:
        env, episodes = self._endpoint.env, self._endpoint.episodes
        kind = type(env.taskset).task_type()
        data = kind.data_type().model_validate({key: value for key, value in row.items() if value is not None})
        task = kind(data, env.config.taskset.task)
        episode = await env.run_episode(task, context, on_trace=lambda t: episodes.update({t.id: (t, self)}))
        for error in [*episode.errors, *(e for trace in episode.traces if not trace.ok for e in trace.errors)][-1:]:
            text = " ".join(error.message.split())
            text = text if len(text) < 400 else f"{text[:150]} ... {text[-250:]}"
            raise (ConnectionError if error.type in PASSING else RuntimeError)(f"{error.type}: {text}")

    def _score(self) -> float:
        """The reward of the trained agent. Its parts and its metrics become `metrics`."""
        trace = self._trace
        if late := [name for name, reward in trace.rewards.items() if reward is None]:
            raise TimeoutError(f"the environment gave no reward {late[0]} in its own time limit")
        self.metrics = {name: float(reward.score) for name, reward in trace.rewards.items()}
        self.metrics |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return float(trace.reward)

    async def _request(self) -> Optional[dict]:
        """The body of the next request, or None at the end of the episode."""
        asked = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([asked, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            self._episode.result()  # raises what the environment raised
            return None
        if isinstance(asked.result(), Exception):
            raise asked.result()
        return asked.result()


def _plain(message: Any) -> dict:
    """A message without what is optional: programs write these differently at each turn."""
    plain = message.model_dump(exclude_none=True, exclude={"name"})
    return {**plain, "content": plain.get("content") or ""}


def as_completion(response: Any, number: int) -> dict:
    """A turn in the form of OpenAI's API. The arguments of a malformed call are its fault, which is no JSON."""
    calls = [
        {
            "id": f"call{number:03d}{place:02d}",
            "type": "function",
            "function": {
                "name": call["name"] or "tool",
                "arguments": call["error"] if "error" in call else json.dumps(call["arguments"]),
            },
        }
        for place, call in enumerate(response.tool_calls)
    ]
    message = {"role": "assistant", "content": str(response), **({"tool_calls": calls} if calls else {})}
    reason = "length" if not response.finished else "tool_calls" if calls else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": message}
    return {"id": "policy", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def as_chunk(completion: dict) -> dict:
    """The whole of a completion as one event of a stream."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(delta["tool_calls"])]
    choice = {"index": 0, "finish_reason": choice["finish_reason"], "delta": delta}
    return {**completion, "object": "chat.completion.chunk", "choices": [choice]}


def from_verifiers(env: vf.Env) -> Callable[[], VerifiersEnvironment]:
    """What `--env` needs of an environment of `verifiers`: `make_environment = from_verifiers(vf.load_environment(...))`.

    Raises UserError for another version of the package, and for limits of tokens, which the trainer does not count there.
    """
    if not version("verifiers").startswith("0.4."):
        raise UserError("from_verifiers", f"verifiers {version('verifiers')}", CURE)
    for name, agent in env.config:
        limits = [limit for limit in TOKEN_LIMITS if getattr(agent, limit, None)]
        if isinstance(agent, vf.AgentConfig) and limits:
            raise UserError("from_verifiers", f"{name}.{limits[0]}", "--generate_max_len, which limits all tokens")
    endpoints: dict[Any, Endpoint] = {}  # by event loop

    def endpoint() -> Endpoint:
        return endpoints.setdefault(asyncio.get_running_loop(), Endpoint(env))

    return lambda: VerifiersEnvironment(endpoint)

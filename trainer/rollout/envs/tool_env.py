"""Environments with Python functions as tools: their names, docstrings and type hints are what the model reads of them."""

import inspect
import json
import types
from collections.abc import Callable, Sequence
from typing import Any, Optional
from unittest import mock

from trainer.errors import UserError
from trainer.rollout.user_code import describe_error, is_passing, patiently_tried, settled

FLAG = "--env"
NO_TOOLS = ("reset", "reward", "close")  # methods that the episode calls itself


class ToolEnvironment:
    """One episode: the model may call tools. A turn without a call is its answer, which the reward scores.

    A subclass has `call(name, arguments)`, which returns the text of the result and whether the tool failed.
    """

    tools: Optional[list[dict]] = None

    def __init__(self, reward: Callable[[dict, str], float], opening: Callable[[dict], list[dict]]):
        self._reward, self._opening = reward, opening
        self.metrics = {"tool_calls": 0.0, "tool_errors": 0.0}

    def reset(self, task: dict) -> list[dict]:
        self._task = task
        return self._opening(task)

    def step(self, response: Any) -> Any:
        if not response.tool_calls:
            return float(self._reward(self._task, str(response))), True
        messages = []
        for call in response.tool_calls:
            fault = call.get("error")  # of a malformed call, which the model reads
            text, failed = (f"error: {fault}", True) if fault else self.call(call["name"], call["arguments"])
            self.metrics["tool_calls"] += 1
            self.metrics["tool_errors"] += failed
            messages.append({"role": "tool", "name": call["name"] or "tool", "content": text})
        return messages


class FunctionEnvironment(ToolEnvironment):
    """The tools are functions, by name. `owner`, if there is one, is the object whose methods they are."""

    def __init__(
        self, functions: dict[str, Callable], tools: list[dict], owner: Any, reward: Callable, opening: Callable
    ):
        super().__init__(reward, opening)
        self.tools, self._functions, self._owner = tools, functions, owner

    def reset(self, task: dict) -> list[dict]:
        if callable(getattr(self._owner, "reset", None)):
            self._owner.reset(task)
        return super().reset(task)

    def call(self, name: str, arguments: dict) -> tuple[str, bool]:
        function = self._functions.get(name)
        if function is None:
            return f"error: no tool {name}; there are {', '.join(self._functions)}", True
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {name}: {error}", True

        def act() -> Any:
            return settled(function(**arguments))

        try:  # a second call of a tool that books or writes would do it twice
            value = patiently_tried(act) if getattr(function, "repeatable", False) else act()
            return value if isinstance(value, str) else json.dumps(value, default=str), False
        except Exception as error:  # the model reads what its call did, as from any tool
            if is_passing(error):  # it did nothing wrong
                raise
            return f"error: {type(error).__name__}: {error}", True

    def close(self) -> None:
        if callable(getattr(self._owner, "close", None)):
            self._owner.close()


def opening_of(task: dict) -> list[dict]:
    """The first messages of a row: its column `messages`, or else its column `prompt` or `question`."""
    columns = ("messages", "prompt", "question")  # a row of another set may have None in one of them
    value = next((task[name] for name in columns if task.get(name) is not None), None)
    if value is None:
        raise ValueError(f"no column messages, prompt or question: {', '.join(task)}")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def from_tools(
    tools: Sequence[Callable] | type,
    reward: Optional[Callable[[dict, str], float]] = None,
    opening: Callable[[dict], list[dict]] = opening_of,
) -> Callable[[], FunctionEnvironment]:
    """What `--env` needs for Python functions as tools: `make_environment = from_tools([add, search], reward)`.

    `reward(task, answer)` scores the turn without a call. `tools` may also be a class. Each episode then has an object of
    it, and all its public methods are tools, except `reset(task)`, `reward(task, answer)` and `close()`, which it may have.
    Schemas are those of `transformers.utils.get_json_schema`: every tool needs type hints, and a docstring that explains
    each argument. Raises UserError if one has none. A tool with the attribute `repeatable` is called again after a failed
    connection.
    """
    is_class = inspect.isclass(tools)
    members = dict(inspect.getmembers(tools, inspect.isroutine)) if is_class else {}
    public = [name for name in members if not name.startswith("_") and name not in NO_TOOLS]
    chosen = [_bound(tools, name) for name in public] if is_class else list(tools)
    functions = {function.__name__: function for function in chosen}
    if len(functions) < len(chosen):
        raise UserError(FLAG, "from_tools with two tools of one name", "tools with names of their own")
    if not functions:
        raise UserError(FLAG, "from_tools without a tool", "functions, or a class with public methods")
    if reward is None and "reward" not in members:
        raise UserError(FLAG, "from_tools without a reward", "reward(task, answer), as an argument or a method")
    schemas = [_schema(function) for function in functions.values()]

    def make() -> FunctionEnvironment:
        owner = tools() if is_class else None
        own = {name: getattr(owner, name) for name in functions} if is_class else functions
        return FunctionEnvironment(own, schemas, owner, reward or owner.reward, opening)

    make.tools = schemas
    return make


def _bound(owner: type, name: str) -> Callable:
    """A method as a call of an object sees it: without self. A static or class method is so already."""
    function = getattr(owner, name)
    is_free = isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
    return function if is_free else types.MethodType(function, owner)


def _schema(function: Callable) -> dict:
    """The schema of a tool, without that of its result, which no template shows."""
    from transformers.utils import chat_template_utils  # here: an environment without such tools does not wait for it

    try:  # without torch, which it would import for a hint of torch.dtype, in the process of each episode
        with mock.patch.object(chat_template_utils, "is_torch_available", lambda: False):
            schema = chat_template_utils.get_json_schema(function)
    except Exception as error:  # of its docstring or its type hints
        raise UserError(
            FLAG, f"tool {function.__name__}: {describe_error(error)}", "type hints and a docstring"
        ) from None
    schema["function"].pop("return", None)
    return schema

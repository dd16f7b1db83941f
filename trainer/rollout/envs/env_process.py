"""--env_sandbox: each environment in its own process, with a memory limit and without a network.

The process may be killed, or hang, or run out of memory. That ends its episode and nothing else. It answers in JSON, so
the code in it cannot make the trainer run code. Files are not isolated: it has the rights of the user.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import multiprocessing
import os
import resource
import signal
import time
from typing import Any, Optional

from trainer.entry import end_with_parent
from trainer.rollout.envs.environments import Failure, Response, Step, load_environment, read_opening, read_step, reset
from trainer.rollout.user_code import describe_error

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
STARTS = 3  # processes that `reset` tries, one after the other
LOST = {"lost": 1.0}  # a metric of every such environment


class ProcessEnvironment:
    """The environment of `--env NAME`, with `reset`, `step` and `close`. Its process begins at `reset`."""

    def __init__(self, name: str, memory_mb: int, timeout: float):
        self._name, self._memory_mb, self._timeout = name, memory_mb, timeout
        self._process: Any = None
        self.tools: Optional[list] = None
        self.metrics: dict[str, float] = {"lost": 0.0}

    def reset(self, task: dict) -> Any:
        """The first messages, or a `Failure`: if even this call fails in several processes, no episode would be sound."""
        deadline, answer = time.monotonic() + self._timeout, None
        for _ in range(STARTS):
            answer = answer or self._begin(task, deadline)
        if answer is None:
            return Failure(" lost its process, or took too long", "a larger --env_memory_mb or --env_timeout")
        if "error" in answer:
            return Failure(answer["error"])
        self.tools = answer["tools"]
        return answer["messages"]

    def _begin(self, task: dict, deadline: float) -> Optional[dict]:
        """The answer of a new process to `reset`, or None if it is lost."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trainer.rollout.envs.env_process"])
        self._connection, its_end = context.Pipe()
        arguments = (its_end, self._name, self._memory_mb)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        its_end.close()
        return self._ask({"reset": task}, max(0.0, deadline - time.monotonic()))

    def step(self, response: Response) -> Any:
        """What the environment's `step` gave, or the end of the episode if the process is lost."""
        asked = {"text": str(response), "raw": response.raw, "calls": response.tool_calls}
        answer = self._ask({"step": {**asked, "finished": response.finished}}, self._timeout)
        if answer is None:
            self.metrics |= LOST
            return Step()
        if "error" in answer:
            return Failure(answer["error"])
        self.metrics |= answer["metrics"]
        return answer["messages"], answer["reward"], answer["done"]

    def close(self) -> None:
        """End the process, and all that it has started."""
        if self._process is not None:
            for end in (os.killpg, os.kill):  # it may not have come to make a group of its own
                with contextlib.suppress(ProcessLookupError):
                    end(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._connection.close()
            self._process = None

    def _ask(self, request: dict, timeout: float) -> Optional[dict]:
        """The answer, or None if the process is gone or takes longer than the limit."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            self._connection.send_bytes(json.dumps(request, default=str).encode())
            if self._connection.poll(timeout):
                answer = json.loads(self._connection.recv_bytes())
                return answer if isinstance(answer, dict) else None
        self.close()
        return None


# --- in the process


def serve(connection: Any, name: str, memory_mb: int) -> None:
    """Answer requests until the trainer closes the connection."""
    try:
        _confine(memory_mb)
        env = load_environment(name)()
    except BaseException as error:
        connection.send_bytes(json.dumps({"error": f" raised {describe_error(error)}"}).encode())
        return
    runner = asyncio.Runner()  # one event loop: an environment may have tasks that live longer than a call
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = _answer(env, request, runner)
        except MemoryError:
            os._exit(1)
        except BaseException as error:
            answer = {"error": f" raised {describe_error(error)}"}
        connection.send_bytes(json.dumps(answer).encode())


def _answer(env: Any, request: dict, runner: asyncio.Runner) -> dict:
    if "reset" in request:
        messages = read_opening(_result(reset(env, request["reset"]), runner))
        return {"messages": messages, "tools": getattr(env, "tools", None)}
    asked = request["step"]
    response = Response(asked["text"], asked["raw"], asked["calls"], asked["finished"])
    step = read_step(_result(env.step(response), runner))
    metrics = getattr(env, "metrics", None)
    metrics = {name: float(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    return {"messages": step.messages, "reward": step.reward, "done": step.done, "metrics": metrics}


def _result(value: Any, runner: asyncio.Runner) -> Any:
    """The value that a plain or an async function of the environment gives."""

    async def awaited() -> Any:
        return await value

    return runner.run(awaited()) if inspect.isawaitable(value) else value


def _confine(memory_mb: int) -> None:
    """Set the limits of this process and of all that it starts. Raises OSError without network namespaces."""
    end_with_parent()
    os.setsid()
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this machine allows no network namespace, which --env_sandbox needs")

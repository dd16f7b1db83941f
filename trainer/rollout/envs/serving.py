"""What runs in the process of an environment: it answers `reset` and `step` in JSON, until the trainer is gone."""

import asyncio
import json
import os
import socket
from typing import Any

from trainer.errors import UserError
from trainer.rollout.envs.environments import Response, Source, read_opening, read_step, reset
from trainer.rollout.peers import read_frame, send_frame
from trainer.rollout.user_code import describe_error, is_passing, settled

REQUEST_BYTES = (1 << 32) - 1  # of the trainer, which is trusted: what a frame can hold


def serve(connection: socket.socket, source: Source) -> None:
    """Answer requests. Returns when the trainer closes the connection."""
    try:
        env = source.make()
    except UserError as error:
        refuse(connection, {"error": str(error), "parts": [error.where, error.found, error.allowed]})
        return
    except BaseException as error:
        refuse(connection, {"error": f" raised {describe_error(error)}"})
        return
    runner = asyncio.Runner()  # one event loop: an environment may have tasks that live longer than a call
    while True:
        try:
            request = json.loads(read_frame(connection, max_bytes=REQUEST_BYTES))
        except EOFError:
            return
        try:
            answer = _answer(env, request, runner)
        except MemoryError:
            os._exit(1)
        except BaseException as error:
            answer = {"error": f" raised {describe_error(error)}", "passing": is_passing(error)}
        send_frame(connection, json.dumps(answer).encode())


def refuse(connection: socket.socket, answer: dict) -> None:
    """Answer the first request with the error of a sandbox or an environment that cannot be made."""
    read_frame(connection, max_bytes=REQUEST_BYTES)
    send_frame(connection, json.dumps(answer).encode())


def _answer(env: Any, request: dict, runner: asyncio.Runner) -> dict:
    if "probe" in request:
        return {}
    if "reset" in request:
        messages = read_opening(settled(reset(env, request["reset"]), runner.run))
        return {"messages": messages, "tools": getattr(env, "tools", None)}
    asked = request["step"]
    response = Response(asked["text"], asked["raw"], asked["calls"], asked["finished"], asked["turns_left"])
    value = settled(env.step(response), runner.run)
    try:
        step = read_step(value)
    except UserError as error:  # such as a reward of NaN: it costs the episode
        print(f"--env: step: {error}; the episode is lost", flush=True)
        return {}
    metrics = getattr(env, "metrics", None)
    metrics = {name: float(value) for name, value in metrics.items()} if isinstance(metrics, dict) else {}
    answer = {"messages": step.messages, "reward": step.reward, "done": step.done, "metrics": metrics}
    return answer | ({"history_tools": getattr(env, "tools", None)} if step.is_history else {})

"""Limits of what comes from others: files, images, archives, answers of servers and environments. One table.

`--limits NAME=VALUE` raises one. The table belongs to the process, since readers deep in libraries ask for it.
"""

import gc
import json
import os
import resource
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import UserError

MB = 1 << 20
DEFAULTS: dict[str, tuple[int, str]] = {
    "answer_mb": (32, "MB of one answer of a reward server, an engine, an environment or an MCP server"),
    "values": (200_000, "values of the JSON of one answer; each takes up to 100 bytes"),
    "metrics": (256, "metrics of one environment"),
    "answer_s": (30, "seconds for the start and for each call of an MCP server, where from_mcp has no timeout="),
    "pages": (100, "pages of the list of tools of an MCP server"),
    "printed_kb": (1024, "KB that one environment in --env_sandbox prints on the screen"),
    "pixels": (100_000_000, "pixels of an image"),
    "image_mb": (64, "MB of an image file"),
    "ratio": (200, "times that a compressed file may grow; archives and column files below unpacked_mb are exempt"),
    "unpacked_mb": (256, "MB that any compressed file may grow to"),
    "files": (10_000, "files and folders in a folder of data"),
    "columns": (4096, "columns of a data file"),
    "row_mb": (256, "MB of one row of text"),
    "text_mb": (16, "million characters of a text that is tokenized; each takes up to 300 bytes"),
    "json_mb": (256, "MB of a file of text of a model or a run, such as JSON or a vocabulary"),
    "template_s": (10, "seconds for a chat template to render a conversation"),
    "template_mb": (2048, "MB for a chat template to render a conversation"),
    "engine_wait_s": (600, "seconds to wait for a rollout server while none is left"),
    "body_mb": (64, "MB of a request to serve_rm or serve_train; all requests together hold 16 times this"),
    "connections": (1024, "connections to serve_rm or serve_train at a time; one beyond them gets 503"),
    "request_s": (30, "seconds for a whole request to serve_rm or serve_train to arrive"),
    "queue": (16_384, "texts that wait at serve_rm; a request beyond them gets 503"),
    "text_kb": (4096, "KB of a prompt or a response for serve_rm"),
    "request_values": (1_000_000, "values of the JSON of a request to serve_rm or serve_train"),
    "unread": (8192, "answers that a session of serve_train has not read"),
    "unread_kb": (262_144, "KB of these answers, and of its requests that wait for their turn"),
    "read_kb": (16_384, "KB of answers that a session has read, kept for a client that missed one and asks again"),
    "call_kb": (64, "KB of a request to serve_engine that brings weights"),
}
HELP = "raise limits of untrusted input: NAME=NUMBER ..., see SECURITY.md"
_raised: dict[str, int] = {}


def limit(name: str) -> int:
    """The limit of this process."""
    return _raised.get(name, DEFAULTS[name][0])


def raise_limits(settings: Iterable[str]) -> None:
    """Read the values of --limits, such as pixels=400000000. Raises UserError for an unknown name or no number, and changes none."""
    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in DEFAULTS or not value.isdecimal() or not int(value):
            allowed = ", ".join(f"{key}={default}" for key, (default, _) in DEFAULTS.items())
            raise UserError("--limits", setting, f"NAME=NUMBER of {allowed}")
        found[name] = int(value)
    _raised.update(found)


def raised() -> list[str]:
    """The settings of this process, for `raise_limits` in another one."""
    return [f"{name}={value}" for name, value in _raised.items()]


class TooLarge(UserError):
    """Something is above a limit of --limits."""


def too_large(where: str, found: Any, name: str) -> TooLarge:
    """The error for what is above limit `name`."""
    shown = f"{limit(name)} ({DEFAULTS[name][1]})"
    return TooLarge(where, str(found), f"at most {shown}; --limits {name}=N raises it")


@contextmanager
def opened(path: str, where: str = "", max_bytes: int | None = None) -> Iterator[Any]:
    """A regular file, opened to read bytes. A FIFO or a device, which could block or never end, is refused.

    Raises UserError for those and for more than `max_bytes`, OSError as `open` does.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise UserError(where or path, f"{path} is no regular file", "a file, no pipe, device or folder")
        if max_bytes is not None and facts.st_size > max_bytes:
            raise too_large(where or path, f"{path} has {facts.st_size / MB:.0f} MB", "json_mb")
        yield file


def read_text(path: str, where: str = "") -> str:
    """The text of a JSON or YAML file of a model or a run. Raises UserError and OSError as `opened`, and ValueError."""
    with opened(path, where, limit("json_mb") * MB) as file:
        return file.read().decode("utf-8")


def read_model_config(folder: str) -> dict:
    """The config.json of a model folder. Raises as `read_text` does, and UserError for JSON that is no object."""
    config = json.loads(read_text(path := os.path.join(folder, "config.json")))
    if not isinstance(config, dict):
        raise UserError(path, f"holds {str(config)[:40]!r}", "a JSON object, as it was published")
    return config


def positions_of(folder: str) -> int | None:
    """How many tokens the model of a local folder has positions for. None: any number, or its config.json does not say."""
    try:
        config = read_model_config(folder)
        text = {**config, **(config.get("text_config") or {})}
        found = text.get("max_position_embeddings", text.get("n_positions"))  # GPT-2 and GPT-J have the second
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, UserError):
        return None  # a name on the hub, an adapter; or the reader of the model says what is wrong with it
    return found if isinstance(found, int) and found > 0 else None


def lines_of(path: str, where: str = "") -> Iterator[bytes]:
    """The lines of a file with their ends. Raises UserError for one that is too long, and as `opened` does."""
    with opened(path, where) as file:
        while line := file.readline(limit("row_mb") * MB + 1):
            if len(line) > limit("row_mb") * MB:
                raise too_large(where or path, f"a line of {path} has more than {limit('row_mb')} MB", "row_mb")
            yield line


@contextmanager
def time_limit(name: str, where: str) -> Iterator[None]:
    """Raise UserError in the middle of what runs longer than limit `name`, in seconds of CPU. Main threads only.

    The timer costs 2 microseconds, so each row of a data set can have one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise too_large(where, "did not end in time", name)

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit(name))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def within_memory(name: str, where: str, function: Callable[..., Any], *values: Any) -> Any:
    """The result of `function(*values)`. Raises UserError if it takes more than limit `name`, in MB of private memory.

    Main threads of Linux only. Addresses that are only reserved do not count: CUDA reserves more than a machine has. Memory
    that the process holds free does not count either. Other threads have the same limit meanwhile, so it is far above what
    they ask for. It costs 15 microseconds. Source: RLIMIT_DATA in getrlimit(2).
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if threading.current_thread() is not threading.main_thread() or sys.platform != "linux":
        return function(*values)
    with open("/proc/self/statm") as file:
        most = int(file.read().split()[5]) * resource.getpagesize() + limit(name) * MB  # data and stack
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        return function(*values)
    except MemoryError:
        pass  # raised below: an error from here would hold the frames, and a second try would begin with their memory
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    gc.collect()  # a template and its context are a circle
    raise too_large(where, "takes too much memory", name)


def is_inside(name: str) -> bool:
    """Whether a path is a plain one below its folder: relative, and without `..`."""
    return name == os.path.normpath(name) and not os.path.isabs(name) and name.split(os.sep)[0] not in ("..", ".")

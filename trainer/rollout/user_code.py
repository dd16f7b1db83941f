"""Code of the user: how its files are run, how its errors read, and which of them may pass."""

import ast
import asyncio
import filecmp
import http.client
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import time
import urllib.error
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trainer.checkpoints.user_modules import module_files
from trainer.errors import Failed, UserError

FOLDERS_OF_FILES: list[str] = []  # put on Python's path for the modules beside a file; no sandbox shows them for that
PAUSES = (0.5, 1.0)  # seconds before the second and the third try
RETRIED = (408, 425, 429)  # 4xx statuses after which the same request may succeed later
# errors of a connection or of a time limit; those of packages by name, as no package need be there
OF_PYTHON = (ConnectionError, TimeoutError, http.client.HTTPException, urllib.error.URLError, socket.gaierror)
OF_PACKAGES = {
    *("requests.ConnectionError", "requests.Timeout", "requests.ChunkedEncodingError", "httpx.TransportError"),
    *("aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "openai.APIConnectionError"),
    *("anthropic.APIConnectionError", "urllib3.MaxRetryError", "urllib3.ProtocolError", "urllib3.TimeoutError"),
}


def import_code(source: str, flag: str) -> ModuleType:
    """Run the Python file `source`, or import the module of that name. `flag` names it in errors.

    A file finds the modules beside it, as with `python FILE`. Installed ones come first.

    Raises UserError if there is none, or if it raises an error.
    """
    try:
        if source.endswith(".py") and os.path.isfile(source):
            folder = os.path.dirname(os.path.abspath(source))
            if folder not in sys.path:
                sys.path.append(folder)
                FOLDERS_OF_FILES.append(folder)
            spec = importlib.util.spec_from_file_location("user_code", source)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _check_modules_beside(source, flag)
            return module
        if not source.endswith(".py") and importlib.util.find_spec(source):
            return importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(flag, f"{source} cannot be imported: {describe_error(error)}") from None
    raise UserError(flag, f"{source} is no file", "the path of a .py file, or a module")


def _check_modules_beside(source: str, flag: str) -> None:
    """Raise UserError if a file needs a module beside it, and Python has loaded that of another file's folder by its name."""
    root, (_, *files) = module_files(source, is_module=False)
    for file in files:
        name = os.path.splitext(os.path.relpath(file, root))[0].removesuffix("/__init__").replace(os.sep, ".")
        loaded = getattr(sys.modules.get(name), "__file__", None) or file
        is_of_user = any(loaded.startswith(folder + os.sep) for folder in FOLDERS_OF_FILES if folder != root)
        if is_of_user and not filecmp.cmp(loaded, file, shallow=False):
            raise UserError(
                flag, f"{source} imports {name}, and {loaded} is loaded by that name", "other names of files"
            )


def check_syntax(path: str, flag: str) -> None:
    """Raise UserError for a file that is no Python. Its code does not run."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # the import repeats them
            ast.parse(file.read(), path)
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        raise UserError(flag, f"{path} cannot be imported: {describe_error(error)}") from None


def describe_error(error: BaseException) -> str:
    """The type and text of an error in one line, with the line of the innermost call."""
    trace, line = error.__traceback__, None
    while trace:
        line, trace = trace.tb_lineno, trace.tb_next
    message = " ".join(str(error).split())
    is_named = isinstance(error, SyntaxError)  # its text has the file and the line; the innermost call is Python's own
    return f"{type(error).__name__}: {message}" + (f" (line {line})" if line and not is_named else "")


def is_passing(error: BaseException) -> bool:
    """Whether the user's code may go well the next time: a connection or a time limit failed, or a server with a status
    of 408, 425, 429 or 5xx."""
    if isinstance(error, Failed):
        return True
    found = [getattr(error, "code", None), getattr(error, "status", None), getattr(error, "status_code", None)]
    found.append(getattr(getattr(error, "response", None), "status_code", None))
    statuses = [value for value in found if isinstance(value, int) and 400 <= value < 600]
    if statuses and isinstance(error, Exception):
        return statuses[0] in RETRIED or statuses[0] >= 500
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return isinstance(error, OF_PYTHON) or not names.isdisjoint(OF_PACKAGES)


def patiently_tried(act: Callable[[], Any]) -> Any:
    """`act()`. An error that may pass leads to another try after each of PAUSES."""
    for pause in PAUSES:
        try:
            return act()
        except Exception as error:
            if not is_passing(error):
                raise
        time.sleep(pause)
    return act()


def settled(value: Any, run: Callable = asyncio.run) -> Any:
    """The value that a plain or an async function gave. `run` runs an async one, by default in an event loop of its own."""

    async def awaited() -> Any:
        return await value

    return run(awaited()) if inspect.isawaitable(value) else value

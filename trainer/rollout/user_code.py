"""Code of the user: how its files are run, and how its errors read."""

import importlib
import importlib.util
import os
from types import ModuleType

from trainer.errors import UserError


def import_code(source: str, flag: str) -> ModuleType:
    """Run the Python file `source`, or import the module of that name. `flag` names it in errors.

    Raises UserError if there is none, or if it raises an error.
    """
    try:
        if source.endswith(".py") and os.path.isfile(source):
            spec = importlib.util.spec_from_file_location("user_code", source)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        if not source.endswith(".py") and importlib.util.find_spec(source):
            return importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(flag, f"{source} cannot be imported: {describe_error(error)}") from None
    raise UserError(flag, f"{source} is no file", "the path of a .py file, or a module")


def describe_error(error: BaseException) -> str:
    """The type and text of an error in one line, with the line of the innermost call."""
    trace, line = error.__traceback__, None
    while trace:
        line, trace = trace.tb_lineno, trace.tb_next
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" + (f" (line {line})" if line else "")

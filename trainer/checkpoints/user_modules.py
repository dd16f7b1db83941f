"""The Python files of the user that a reward file or an environment needs, found in their text. No code runs.

With --env_sandbox this process never imports them. So the imports are read, also those inside of functions. A module that is
imported under a name made at run time is not found.
"""

import ast
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

OF_PACKAGES = {"site-packages", "dist-packages"}
OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # this package, which has a version
CALLS = ("import_module", "__import__")  # with a name in quotation marks


def module_files(name: str, is_module: bool) -> tuple[str, list[str]]:
    """(a folder, the files in it that a file needs, itself first). ("", []) without such a file.

    `is_module`: the name may also be that of a module.

    The folder is that of the file, or of the whole package of a module.
    """
    places = list(dict.fromkeys(os.path.abspath(place) for place in ("", *sys.path)))
    if os.path.isfile(name):
        first = [os.path.abspath(name)]
        root = os.path.dirname(first[0])
    else:
        own = (
            next((place for place in places if _files_of(name, place)), None)
            if is_module and _is_dotted(name)
            else None
        )
        if own is None:
            return "", []
        first = _files_of(name, own)[::-1]
        root = os.path.dirname(first[0]) if len(first) == 1 else os.path.join(own, name.split(".")[0])
    found, waiting = dict.fromkeys(first), list(first)
    while waiting:
        path = waiting.pop()
        for wanted, base in _imports(path):
            for place in [base] if base else [root, *places]:
                if files := [file for file in _files_of(wanted, place) if _is_within(file, root)]:
                    new = [file for file in files if file not in found]
                    found |= dict.fromkeys(new)
                    waiting += new
                    break
    return root, list(found)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _files_of(name: str, place: str) -> list[str]:
    """The files that an import of a dotted name reads in a folder: those of its packages, then its own. [] if it is not there."""
    files, path, parts = [], place, name.split(".")
    for part in parts:
        path = os.path.join(path, part)
        candidates = os.path.join(path, "__init__.py"), f"{path}.py"
        files += [next(filter(os.path.isfile, candidates), "")]
        if not files[-1] and not os.path.isdir(path):
            return []
    return [file for file in files if file] if files[-1] else []


def _is_within(path: str, root: str) -> bool:
    inside = os.path.relpath(path, root).split(os.sep)
    return inside[0] != ".." and not OF_PACKAGES & set(inside) and os.path.commonpath([path, OWN]) != OWN


def _imports(path: str) -> Iterator[tuple[str, str]]:
    """(dotted name, the folder where a relative one begins or "") of what a file imports. Each part may be a module."""
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError, ValueError, OSError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself will tell
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path if node.level else ""
            for _ in range(node.level):
                base = os.path.dirname(base)
            if node.module:
                yield node.module, base
            yield from ((".".join(filter(None, [node.module, alias.name])), base) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in CALLS:
            yield from ((own.value.lstrip("."), "") for own in node.args[:1] if _is_text(own))


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)

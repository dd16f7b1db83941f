"""List the code of trainer/ that only a GPU would reach, and of it what the given tests execute on this machine.

    python scripts/gpu_branches.py                 all of it
    python scripts/gpu_branches.py test/models     what `pytest test/models` does not execute

Such code is one side of a condition: of an `if`, of a conditional expression, of `and` and `or`, or of a comprehension.
A condition asks for a GPU by its words, by a name that was assigned such a condition, or by a function that returns one.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# the last word of a name, attribute or call: whether its truth means a GPU
WORDS = {"is_cuda": True, "on_gpu": True, "has_gpu": True, "is_nccl_available": True, "on_cpu": False, "is_cpu": False}
STRINGS = {"cuda": True, "nccl": True, "cpu": False}
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Branch:
    path: Path
    function: str
    condition: str
    line: int  # the first one that runs on a GPU only
    column: int = -1  # of an expression within its line

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT / 'trainer')}: {self.function}: {self.condition}"


def means_gpu(node: ast.expr, names: dict[str, bool]) -> bool | None:
    """True if `node` is true on a GPU only, False if it is false on a GPU only, None if it does not tell.

    `names`: what other names mean.
    """
    match node:
        case ast.UnaryOp(op=ast.Not()):
            inner = means_gpu(node.operand, names)
            return None if inner is None else not inner
        case ast.BoolOp():
            found = {means_gpu(value, names) for value in node.values}
            one = isinstance(node.op, ast.And)  # one operand is enough for this answer, the other one needs all
            return one if one in found else (not one if found == {not one} else None)
        case ast.NamedExpr():
            return means_gpu(node.value, names)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            strings = [STRINGS[n.value] for n in (left, right) if isinstance(n, ast.Constant) and n.value in STRINGS]
            is_none = isinstance(right, ast.Constant) and right.value is None
            if strings or is_none:
                asked = strings[0] if strings else means_gpu(left, names)
                unequal = isinstance(op, ast.NotEq | ast.NotIn) if strings else isinstance(op, ast.Is)
                return None if asked is None else asked != unequal
            return True if "torch.cuda." in ast.unparse(node) else None  # only a GPU has what is compared
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value=start)]) if start in STRINGS:
            return STRINGS[start]
        case ast.Call():
            return means_gpu(node.func, names)
        case ast.Name(id=word) | ast.Attribute(attr=word):
            text = ast.unparse(node)
            return True if text.startswith(("torch.cuda.", "torch.version.cuda")) else names.get(word)
    return None


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def predicates(paths: list[Path]) -> dict[str, bool]:
    """The functions of `paths` that return a condition, with what it means, and WORDS."""
    names, before = dict(WORDS), None
    functions = [node for path in paths for node in ast.walk(parsed(path)) if isinstance(node, FUNCTIONS)]
    bools = [f for f in functions if f.returns and ast.unparse(f.returns) == "bool"]
    while names != before:
        before = dict(names)
        for function in bools:
            last = function.body[-1]
            if isinstance(last, ast.Return) and (meaning := means_gpu(last.value, names)) is not None:
                names[function.name] = meaning
    return names


def branches(path: Path, names: dict[str, bool] | None = None) -> Iterator[Branch]:
    names = names or predicates([path])
    for part in ast.walk(parsed(path)):
        if isinstance(part, ast.Module | ast.ClassDef):
            yield from _in_block(path, getattr(part, "name", "module"), part.body, names)
        elif isinstance(part, FUNCTIONS):
            yield from _in_block(path, part.name, part.body, names | dict(_assigned(part, names)))


def _assigned(function: ast.AST, names: dict[str, bool]) -> Iterator[tuple[str, bool]]:
    """The names that the function gives to such conditions, with what they mean."""
    for node in ast.walk(function):
        for target in getattr(node, "targets", []) if isinstance(node, ast.Assign) else []:
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for to, value in zip(target.elts, node.value.elts) if several else [(target, node.value)]:
                used = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}  # "a = a and b" asks once
                if isinstance(to, ast.Name) and to.id not in used and (meaning := means_gpu(value, names)) is not None:
                    yield to.id, meaning


def _in_block(path: Path, function: str, block: list[ast.stmt], names: dict[str, bool]) -> Iterator[Branch]:
    for number, node in enumerate(block):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue  # it has its own turn
        asked = means_gpu(node.test, names) if isinstance(node, ast.If) else None
        if asked is not None:
            rest = block[number + 1 :] if isinstance(node.body[-1], LEAVES) else []
            if side := node.body if asked else (node.orelse or rest):
                yield Branch(path, function, ast.unparse(node.test), side[0].lineno)
        for name, value in ast.iter_fields(node):
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, ast.ExceptHandler | ast.match_case):
                    yield from _in_block(path, function, part.body, names)
                elif isinstance(part, ast.AST) and not isinstance(part, ast.stmt) and (name != "test" or asked is None):
                    yield from _in_expression(path, function, part, names)
            if parts and isinstance(parts[0], ast.stmt):
                yield from _in_block(path, function, parts, names)


def _in_expression(path: Path, function: str, part: ast.AST, names: dict[str, bool]) -> Iterator[Branch]:
    for node in ast.walk(part):
        condition = side = None
        if isinstance(node, ast.IfExp) and (asked := means_gpu(condition := node.test, names)) is not None:
            side = node.body if asked else node.orelse
        elif isinstance(node, ast.BoolOp):
            goes_on = isinstance(node.op, ast.And)  # the value with which the next operand is computed
            known = [means_gpu(value, names) is goes_on for value in node.values[:-1]]
            if True in known:
                condition, side = node, node.values[known.index(True) + 1]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            asking = [test for loop in node.generators for test in loop.ifs if means_gpu(test, names)]
            condition, side = (asking[0], node.elt) if asking else (None, None)
        if side is not None:
            yield Branch(path, function, ast.unparse(condition), side.lineno, side.col_offset)


def all_branches() -> list[Branch]:
    paths = sorted((ROOT / "trainer").rglob("*.py"))
    names = predicates(paths)
    return [branch for path in paths for branch in branches(path, names)]


def executed(found: list[Branch], pytest_args: list[str]) -> set[str]:
    """The places of branches that the tests execute, in any of their processes."""
    with tempfile.TemporaryDirectory() as folder:
        lines, hits = Path(folder) / "lines.json", Path(folder) / "hits.txt"
        wanted = {str(path): [(b.line, b.column) for b in found if b.path == path] for path in {b.path for b in found}}
        lines.write_text(json.dumps(wanted))
        path = os.pathsep.join([str(ROOT / "test/gpu_branch_trace"), str(ROOT)])
        environment = {"GPU_BRANCH_LINES": str(lines), "GPU_BRANCH_FOUND": str(hits), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *pytest_args]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
        if code:
            raise SystemExit(f"error: the tests end with exit code {code}")
        return set(hits.read_text().split("\n")) if hits.exists() else set()


def main(argv: list[str]) -> None:
    found = all_branches()
    hits = executed(found, argv) if argv else set()
    rest = [branch for branch in found if branch.place not in hits]
    for branch in rest:
        print(branch)
    print(f"{len(found)} branches for a GPU; {len(rest)} of them not executed")


if __name__ == "__main__":
    main(sys.argv[1:])

"""List the code of trainer/ that only a GPU would reach, and of it what the given tests execute on this machine.

    python scripts/gpu_branches.py                 all of it
    python scripts/gpu_branches.py test/models     what `pytest test/models` does not execute

Such code is the side of an `if` that is taken where `device.type`, `is_cuda`, `on_gpu` or `torch.cuda` tell of a GPU.
An expression within one line has no side of its own; docs/gpu.md names these by hand.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASKS = re.compile(r"is_cuda|device\.type (==|!=)|torch\.cuda\.is_available|\bon_gpu\(")
# conditions that are false on a GPU
FOR_CPU = re.compile(r"== \"cpu\"|!= \"cuda\"|not \S*(is_cuda|on_gpu|torch\.cuda\.is_available)")
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Branch:
    path: Path
    function: str
    condition: str
    line: int  # the first one that runs on a GPU only

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT / 'trainer')}: {self.function}: {self.condition}"


def branches(path: Path) -> Iterator[Branch]:
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_block(path, function.name, function.body)


def _in_block(path: Path, function: str, block: list[ast.stmt]) -> Iterator[Branch]:
    for number, node in enumerate(block):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue  # a function has its own turn
        if isinstance(node, ast.If) and ASKS.search(condition := ast.unparse(node.test).replace("'", '"')):
            rest = block[number + 1 :] if isinstance(node.body[-1], LEAVES) else []
            for_cpu = FOR_CPU.search(condition)
            side = (node.orelse or rest) if for_cpu else node.body
            # "a and not on a GPU" is false in many runs without one, so what follows is no code for a GPU
            if side and not (for_cpu and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)):
                yield Branch(path, function, condition, side[0].lineno)
        for field in ("body", "orelse", "finalbody"):
            yield from _in_block(path, function, getattr(node, field, []))


def all_branches() -> list[Branch]:
    return [branch for path in sorted((ROOT / "trainer").rglob("*.py")) for branch in branches(path)]


def executed(found: list[Branch], pytest_args: list[str]) -> set[str]:
    """The "path:line" of branches that the tests execute, in any of their processes."""
    with tempfile.TemporaryDirectory() as folder:
        lines, hits = Path(folder) / "lines.json", Path(folder) / "hits.txt"
        wanted = {str(path): [b.line for b in found if b.path == path] for path in {b.path for b in found}}
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
    rest = [branch for branch in found if f"{branch.path}:{branch.line}" not in hits]
    for branch in rest:
        print(branch)
    print(f"{len(found)} branches for a GPU; {len(rest)} of them not executed")


if __name__ == "__main__":
    main(sys.argv[1:])

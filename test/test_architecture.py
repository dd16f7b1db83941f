"""The rules of the house, checked on the source: one API for both strategies, floors, and who may know a backend."""

import ast
import inspect
from pathlib import Path

from launch import ROOT

PACKAGE = ROOT / "trainer"
# a file imports only from its own floor or from floors below it
FLOORS = [
    {"errors", "arguments", "metrics"},
    {"datasets", "models.loss"},
    {"models", "strategies.mesh", "strategies.common", "strategies.gradients", "strategies.checkpoint",
     "strategies.data_order", "strategies.checkpoint_store", "strategies.checkpoint_pieces", "strategies.run_state"},
    {"strategies"},
    {"training"},
    {"cli"},
]  # fmt: skip


def floor(module: str) -> int:
    parts = module.split(".")[1:]
    candidates = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next(level for name in candidates for level, names in enumerate(FLOORS) if name in names)


def trainer_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module else set()
    return {name for name in found if name.startswith("trainer.")}


def modules() -> dict[str, Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return {name: path for path, name in names.items() if not name.startswith("trainer.compare")}


def test_files_import_only_from_their_floor_or_below():
    for name, path in modules().items():
        for imported in trainer_imports(path):
            assert floor(imported) <= floor(name), f"{name} (floor {floor(name)}) imports {imported}"


def test_neither_strategy_imports_the_other_nor_models():
    for backend, other in (("deepspeed", "fsdp2"), ("fsdp2", "deepspeed")):
        imports = trainer_imports(PACKAGE / "strategies" / f"{backend}.py")
        assert not any(name.startswith((f"trainer.strategies.{other}", "trainer.models")) for name in imports)


def test_both_strategies_have_the_same_public_signatures():
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy

    def signatures(strategy) -> dict[str, str]:
        methods = inspect.getmembers(strategy, inspect.isfunction)
        return {
            name: str(inspect.signature(f)) for name, f in methods if not name.startswith("_") or name == "__init__"
        }

    assert signatures(DeepspeedStrategy) == signatures(FSDP2Strategy)
    for strategy in (DeepspeedStrategy, FSDP2Strategy):
        assert strategy.__mro__ == (strategy, object)


def test_backend_names_appear_only_where_a_backend_is_chosen():
    allowed = {"trainer.strategies", "trainer.strategies.deepspeed", "trainer.strategies.fsdp2", "trainer.arguments"}
    allowed |= {"trainer.cli.outputs"}  # reports the versions of packages, deepspeed among them
    for name, path in modules().items():
        if name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("deepspeed", "fsdp2"):
                raise AssertionError(f"{name}:{node.lineno} names the backend {node.value!r}")


def test_files_are_small_and_the_sft_command_reaches_few_of_them():
    for name, path in modules().items():
        limit = 600 if name in ("trainer.strategies.deepspeed", "trainer.strategies.fsdp2") else 400
        assert len(path.read_text().splitlines()) <= limit, name
    reached, waiting = set(), ["trainer.cli.train_sft"]
    known = modules()
    while waiting:
        name = waiting.pop()
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name in known and name not in reached:
            reached.add(name)
            waiting += trainer_imports(known[name])
    assert len(reached) <= 31, sorted(reached)
    assert sum(len(known[name].read_text().splitlines()) for name in reached) <= 4700

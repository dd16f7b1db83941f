"""The rules of the house, checked on the source: one API for both strategies, floors, and who may know a backend."""

import ast
import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
from launch import ROOT, run_process

PACKAGE = ROOT / "trainer"
# a file imports only from its own floor or from floors below it
FLOORS = [
    {"errors", "arguments", "ppo_arguments", "preference_arguments", "metrics"},
    {"datasets", "models.loss", "models.policy_loss", "training.advantages"},
    {"models", "strategies.adapter", "strategies.autotp", "strategies.mesh", "strategies.common", "strategies.gradients", "strategies.checkpoint",
     "strategies.data_order", "strategies.tensor_parallel", "strategies.replicas", "strategies.ranks", "strategies.checkpoint_store",
     "strategies.checkpoint_pieces", "strategies.run_state", "strategies.zero_masters", "strategies.matrix_optimizers",
     "strategies.adamw_8bit"},
    {"strategies", "rollout"},
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


def test_a_command_reads_only_flags_that_it_has():
    from trainer.arguments import SFTArguments
    from trainer.ppo_arguments import PPOArguments
    from trainer.preference_arguments import DPOArguments, RMArguments

    flags = {
        name: {field.name for field in dataclasses.fields(kind)}
        for name, kind in {"sft": SFTArguments, "rm": RMArguments, "dpo": DPOArguments, "ppo": PPOArguments}.items()
    }
    for path in (PACKAGE / "cli").glob("*.py"):
        commands = [name for name in flags if path.stem in (f"train_{name}", f"{name}_flags", f"{name}_roles")]
        for node in ast.walk(ast.parse(path.read_text())) if commands else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
                assert node.attr in flags[commands[0]], f"{path.name}:{node.lineno} reads args.{node.attr}"


def test_files_are_small():
    for name, path in modules().items():
        limit = 600 if name in ("trainer.strategies.deepspeed", "trainer.strategies.fsdp2") else 400
        assert len(path.read_text().splitlines()) <= limit, name


RUN_AND_LIST = """
import sys
from trainer.cli import entry, train_sft

def run_and_list(argv):
    train_sft.run(argv)
    print("files", *{m.__file__ for name, m in sys.modules.items() if name.startswith("trainer.") and m.__file__})

entry.run_command(run_and_list)
"""


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_plain_sft_run_loads_few_files(backend, tmp_path):
    """What a reader has to read: the code of the other backend and of layouts that are not asked for stays unloaded."""
    flags = ["--backend", backend, "--max_steps", "1", "--output_dir", str(tmp_path / "run"), "--no_save"]
    code, output = run_process([sys.executable, "-c", RUN_AND_LIST, *flags])
    assert code == 0, output[-2000:]
    files = {path for path in output.split("files ")[-1].split() if Path(path).stat().st_size}
    assert len(files) <= 39, sorted(files)
    assert sum(len(Path(path).read_text().splitlines()) for path in files) <= 6300

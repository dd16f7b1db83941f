"""The rules of the house, checked on the source: floors, one small API for every strategy, names, sizes, reach."""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from launch import ROOT, run_process
from strategies.ddp_strategy import DDPStrategy

PACKAGE = ROOT / "trainer"
# a folder imports only from floors below its own; the files of the ground floor stand in the package itself
FLOORS = [
    {"comma_separated", "errors", "help_texts", "limits", "metrics", "mirrors", "terminal"},
    {"entry", "distributed", "flags"},
    {"datasets"},
    {"model_folders", "optimizers"},
    {"checkpoints", "exact", "model_parallel"},
    {"models", "reports"},
    {"strategies"},
    {"rollout"},
    {"training"},
    {"methods", "planning"},
    {"runs"},
    {"compare"},
    {"cli"},
    {"__main__"},
]
STRATEGY_API = {  # SPEC, section 5
    "setup_distributed", "setup_ring_attn", "create_optimizer", "prepare", "setup_dataloader", "backward",
    "optimizer_step", "save_model", "load_model", "save_ckpt", "load_ckpt", "iter_full_params", "offload", "onload",
    "all_reduce", "all_gather", "print", "is_rank_0",
}  # fmt: skip


def floor(module: str) -> int:
    """`module` is a name such as trainer.models.lora; its first part below `trainer` decides."""
    return next(level for level, names in enumerate(FLOORS) if module.split(".")[1] in names)


def modules() -> dict[str, Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def trainer_imports(path: Path) -> set[str]:
    """The modules of the trainer that a file imports anywhere, also inside functions."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}": node.module for alias in node.names}
            found |= {full if full in known else module for full, module in names.items()}
    return found & known.keys()


def test_folders_import_only_from_floors_below_their_own():
    for name, path in modules().items():
        folder = name.split(".")[1]
        for imported in trainer_imports(path):
            if imported.split(".")[1] != folder and floor(name) > 0:
                assert floor(imported) < floor(name), f"{name} (floor {floor(name)}) imports {imported}"
            assert floor(imported) <= floor(name), f"{name} imports {imported}"


def test_there_is_no_import_circle():
    imports, done = {name: trainer_imports(path) for name, path in modules().items()}, set()

    def visit(name: str, above: list[str]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for imported in imports[name]:
                visit(imported, [*above, name])
            done.add(name)

    for name in imports:
        visit(name, [])


def test_no_two_files_have_the_same_name():
    names = Counter(path.name for path in modules().values() if path.name not in ("__init__.py", "__main__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_neither_strategy_imports_the_other_nor_models():
    for backend, other in (("deepspeed", "fsdp2"), ("fsdp2", "deepspeed")):
        imports = trainer_imports(PACKAGE / "strategies" / f"{backend}.py")
        assert not any(name.startswith((f"trainer.strategies.{other}", "trainer.models")) for name in imports)


def test_every_strategy_has_the_same_small_api():
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy

    def parameters(strategy) -> dict[str, list]:
        """(name, kind, default) of the parameters of each public method."""
        methods = inspect.getmembers(strategy, inspect.isfunction)
        public = {name: inspect.signature(f).parameters.values() for name, f in methods if not name.startswith("_")}
        return {name: [(p.name, p.kind, p.default) for p in found] for name, found in public.items()}

    assert parameters(DeepspeedStrategy) == parameters(FSDP2Strategy) == parameters(DDPStrategy)
    methods = set(parameters(FSDP2Strategy))
    assert methods >= STRATEGY_API and len(methods - STRATEGY_API) <= 4, methods - STRATEGY_API
    for strategy in (DeepspeedStrategy, FSDP2Strategy, DDPStrategy):
        assert strategy.__mro__ == (strategy, object)
        assert list(inspect.signature(strategy).parameters) == ["options"]


def test_an_unknown_backend_is_an_error():
    from trainer.errors import UserError
    from trainer.strategies import get_strategy
    from trainer.strategies.options import StrategyOptions

    with pytest.raises(UserError, match=r"--backend: ddp \(allowed: deepspeed, fsdp2\)"):
        get_strategy("ddp", StrategyOptions())


def test_every_option_of_a_strategy_is_a_flag_with_the_same_default():
    from trainer.flags.common_flags import SFTArguments
    from trainer.flags.parse_flags import flat
    from trainer.strategies.options import StrategyOptions

    flags, options = flat(SFTArguments()), dataclasses.asdict(StrategyOptions())
    options["param_dtype"] = "auto"  # it is resolved before a strategy is built
    assert {name: flags[name] for name in options} == options


def test_backend_names_appear_only_where_a_backend_is_chosen():
    allowed = {
        "trainer.strategies",
        "trainer.strategies.deepspeed",
        "trainer.strategies.fsdp2",
        "trainer.flags.common_flags",
        "trainer.flags.rules",
    }
    # these report the versions of packages, deepspeed among them
    allowed |= {"trainer.runs.outputs", "trainer.planning.doctor_packages", "trainer.planning.versions"}
    # these compare the backends, and --layout auto takes one
    allowed |= {
        f"trainer.planning.{name}"
        for name in ("layout_plan", "plan_memory", "plan_traffic", "predicted_memory", "adapter_memory")
    }
    allowed |= {
        "trainer.flags.names.method_names",
        "trainer.flags.names.training_names",
    }  # `deepspeed` is a name elsewhere
    for name, path in modules().items():
        if name in allowed or name.startswith("trainer.compare"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("deepspeed", "fsdp2"):
                raise AssertionError(f"{name}:{node.lineno} names the backend {node.value!r}")


def test_no_two_groups_of_a_command_have_a_flag_of_the_same_name():
    from trainer.flags.parse_flags import flags_of
    from trainer.flags.rules import COMMANDS

    for name, command in COMMANDS.items():
        names = Counter(field.name for field, _ in flags_of(command))
        assert not [flag for flag, count in names.items() if count > 1], name


def test_flags_are_not_read_by_getattr():
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                assert not (isinstance(node.args[0], ast.Name) and node.args[0].id == "args"), f"{name}:{node.lineno}"


def test_only_dates_come_from_the_clock_that_can_be_set():
    """Deadlines and durations come from time.monotonic, time.perf_counter or the CPU's time."""
    clock = re.compile(r"\btime\.time(_ns)?\b|\bfrom time import|\bdatetime\.(now|utcnow|today)\b|\.getmtime\b")
    found = {name: clock.findall(path.read_text()) for name, path in modules().items()}
    assert {name for name, uses in found.items() if uses} == {
        "trainer.checkpoints.checkpoint_store",  # `written_at`: order only among checkpoints of older versions
        "trainer.datasets.files.stream_rows",  # when a file was written, which a resume tells
        "trainer.entry",  # the form of torchrun's file
        "trainer.reports.live_view",  # the first look at a file
        "trainer.rollout.timeline",  # when a span begins, which ranks share
    }


def test_names_with_commas_are_split_in_one_place():
    splitters = {path.stem for path in PACKAGE.rglob("*.py") if '.split(",")' in path.read_text()}
    numbers_and_settings = {"text_flags", "judge_modes", "doctor_machine"}
    refuses_empty_ones = {"added_tokens"}  # the user may mean the token ","
    assert splitters == {"comma_separated"} | numbers_and_settings | refuses_empty_ones


def test_files_and_functions_are_small():
    for name, path in modules().items():
        limit = 500 if name in ("trainer.strategies.deepspeed", "trainer.strategies.fsdp2") else 400
        assert len(path.read_text().splitlines()) <= limit, name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{name}: {node.name}"
    assert len((ROOT / "test/strategies/ddp_strategy.py").read_text().splitlines()) <= 150


RUN_AND_LIST = """
import json, sys
from trainer import entry
from trainer.cli import train_sft

def run_and_list(argv):
    entered = set()

    def note(frame, event, _):
        if event == "call" and "/trainer/" in frame.f_code.co_filename:
            above, names = frame, []
            while above:
                names.append(above.f_code.co_name)
                above = above.f_back
            if "sft_loss" in names:
                entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    train_sft.run(argv)
    sys.setprofile(None)
    print("found", json.dumps(sorted(entered)))

entry.run_command(run_and_list)
"""


@pytest.fixture(scope="module")
def own_data(tmp_path_factory) -> list[str]:
    """The flags of a model folder and of JSON rows with two columns, as of somebody's own."""
    from trainer.datasets.demos.demo import make_demo

    folder = tmp_path_factory.mktemp("reach")
    make_demo(str(folder))
    rows = [json.loads(line)["messages"] for line in (folder / "sft.jsonl").read_text().splitlines()]
    with (folder / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"question": q["content"], "answer": a["content"]}) + "\n" for q, a in rows)
    keys = ["--input_key", "question", "--output_key", "answer"]
    return ["--pretrain", str(folder / "model"), "--dataset", str(folder / "data.jsonl"), *keys]


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_batch_enters_few_files_on_its_way_to_the_loss(backend, own_data, tmp_path):
    flags = ["--backend", backend, "--max_steps", "1", "--train_batch_size", "8", "--no_save", "--cpu_matmul", "mkl"]
    flags += ["--output_dir", str(tmp_path / "run"), *own_data]
    code, output = run_process([sys.executable, "-c", RUN_AND_LIST, *flags])
    assert code == 0, output[-2000:]
    entered = json.loads(output.split("found ")[-1])
    # from `forward_backward`, in loop.py, to the loss
    assert {Path(path).name for path in entered} == {"sft.py", "token_losses.py", "packing.py"}


# --- flags stop at the door


def functions_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_below_runs_no_function_takes_the_flags():
    """Plain values only. Hooks of torch have the parameters (module, args, kwargs)."""
    for name, path in modules().items():
        if name.split(".")[1] in ("cli", "runs", "flags", "entry"):
            continue
        for function in functions_of(path):
            parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            names = {parameter.arg for parameter in parameters}
            is_hook = "kwargs" in names or "module" in names
            assert "args" not in names or is_hook, f"{name}:{function.lineno}: {function.name} takes args"
            for parameter in parameters:
                kind = ast.unparse(parameter.annotation) if parameter.annotation else ""
                assert not kind.endswith("Arguments"), f"{name}:{function.lineno}: {function.name} takes {kind}"


IMPORTS = re.compile(r"\s*(from |import |#|\)|quiet_libraries\(\)|[\w, ]+,$|$)")  # and the lines between them
PAIR = re.compile(r"\b(with|without) (--[\w{]|\{\w*flag\w*\})|cannot be used with")
OUTSIDE = {
    "exact.exact_products.fix_products": "only the model shows its plan, its vocabulary and its norms",
    "checkpoints.run_identity.fixed": "only the checkpoint shows with which flags it was saved",  # functions that refuse what the flags of a training command do not show, each with the reason
    "cli.verify_run.run": "what follows `--` is a command line, no flag",
    "compare.certificates.plain_replay.check_replay_flags": "the flags are those of a run that has ended",
    "datasets.samples.preference.pair_tokens": "only the rows show whether they are whole texts",
}


def test_pairs_of_flags_are_refused_by_the_table_only():
    found = set()
    for name, path in modules().items():
        for function in () if name.startswith("trainer.flags") else functions_of(path):
            place = f"{name.removeprefix('trainer.')}.{function.name}"
            texts = defaultdict(str)  # what an error may say by a name
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    texts[node.targets[0].id] += ast.unparse(node.value)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError":
                    words = " ".join(texts[ast.unparse(part)] or ast.unparse(part) for part in node.args[:2])
                    if PAIR.search(words):
                        found.add(place)
                        assert place in OUTSIDE, (
                            f"{place}, line {node.lineno}: a row of trainer/flags/*_rules.py: {words}"
                        )
    assert found == OUTSIDE.keys(), "an exception that is none"


def test_an_import_inside_a_function_says_why():
    """A comment on its line, or above the imports that it belongs to."""
    for name, path in modules().items():
        lines = path.read_text().splitlines()
        for function in functions_of(path):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    above = itertools.takewhile(IMPORTS.match, reversed(lines[: node.lineno - 1]))
                    block = [*lines[node.lineno - 1 : node.end_lineno], *above]
                    assert any("#" in line for line in block), f"{name}:{node.lineno} has no reason in a comment"


def test_folders_are_small_and_say_their_trade():
    from trainer.cli.__main__ import OTHERS, RANKED

    for folder in {path.parent for path in modules().values()} - {PACKAGE}:
        files = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
        if folder.name == "cli":
            assert {path.stem for path in files} == {*RANKED.values(), *OTHERS}, "a file for each command, and no other"
        else:
            assert len(files) <= 16, f"{folder.relative_to(ROOT)} has {len(files)} files"
        trade = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert trade, f"{folder.relative_to(ROOT)}/__init__.py does not say the trade of the folder"

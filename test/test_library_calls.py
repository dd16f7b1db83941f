"""Functions of other packages take the arguments that trainer/ gives them, in the installed versions."""

import ast
import importlib.util
import inspect
from collections.abc import Iterator

from launch import ROOT
from packaging.requirements import Requirement

LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "safetensors", "datasets", "huggingface_hub")


def imported_names(tree: ast.Module, packages: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """{name in the file: its full name} of what is imported from `packages`, anywhere in a file."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in found.items() if full.split(".")[0] in packages}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """`torch.distributed.all_reduce` of the expression `dist.all_reduce`; None for what is not imported."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([names[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in names else None


def find(name: str):
    """The object with this full name. Raises AttributeError or ImportError if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(place, full name of the function, call) of each call of a library's function in trainer/."""
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = imported_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            function, call = node.func, node
            if isinstance(function, ast.Attribute) and function.attr == "partial" and node.args:
                function, call = node.args[0], ast.Call(node.args[0], node.args[1:], node.keywords)
            if name := full_name(function, names):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name, call


def fault(function, call: ast.Call) -> str | None:
    """Why a function does not take these arguments. What comes from * and ** is not known, and not judged."""
    try:  # transformers wraps the class methods of AutoModel twice, and `self` is then taken away twice
        signature = inspect.signature(function, follow_wrapped=not inspect.ismethod(function))
    except (ValueError, TypeError):  # a function of C++
        return None
    positional = [None] * sum(not isinstance(argument, ast.Starred) for argument in call.args)
    try:
        signature.bind_partial(*positional, **{word.arg: None for word in call.keywords if word.arg})
    except TypeError as error:
        return str(error)
    return None


def test_calls_of_libraries_fit_their_signatures():
    faults, judged = [], set()
    for place, name, call in calls():
        judged.add(name)
        if reason := fault(find(name), call):
            faults.append(f"{place}: {name}: {reason}")
    assert not faults, "\n".join(faults)
    expected = {"torch.nn.attention.varlen.varlen_attn", "deepspeed.initialize", "deepspeed.zero.Init",
                "torch.distributed.fsdp.MixedPrecisionPolicy", "torch.distributed.init_process_group"}  # fmt: skip
    assert judged >= expected and len(judged) > 100, len(judged)


def test_methods_and_options_that_are_given_in_another_way():
    from deepspeed import DeepSpeedEngine
    from torch.distributed.fsdp import FSDPModule, fully_shard

    inspect.signature(DeepSpeedEngine.backward).bind(None, None, scale_wrt_gas=False)
    inspect.signature(DeepSpeedEngine.set_gradient_accumulation_boundary).bind(None, True)
    inspect.signature(FSDPModule.set_requires_gradient_sync).bind(None, True)
    options = ("mesh", "mp_policy", "reshard_after_forward", "shard_placement_fn", "offload_policy")
    inspect.signature(fully_shard).bind(None, **dict.fromkeys(options))


def test_a_keyword_that_does_not_exist_is_found():
    """As torch 2.11 had no enable_gqa."""
    from torch.nn.attention.varlen import varlen_attn

    call = ast.parse("varlen_attn(q, k, v, a, b, 8, 8, enable_gpa=True)", mode="eval").body
    assert "enable_gpa" in fault(varlen_attn, call)
    names = imported_names(ast.parse("import torch.distributed as dist\nfrom deepspeed import zero"))
    assert full_name(ast.parse("dist.all_reduce", mode="eval").body, names) == "torch.distributed.all_reduce"
    assert full_name(ast.parse("zero.Init", mode="eval").body, names) == "deepspeed.zero.Init"


def test_names_that_files_import_from_each_other_exist():
    """Also imports within functions, which run only when they are needed."""
    lost = []
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainer"):
                if node.module == "trainer.exact.tile_kernel" and importlib.util.find_spec("triton") is None:
                    continue  # a build of torch for CPUs has no Triton
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                lost += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{name}"
                    for name in names
                    if importlib.util.find_spec(f"{node.module}.{name}") is None
                ]
    assert not lost, "\n".join(lost)


def test_names_that_files_take_from_modules_of_the_trainer_exist():
    """Such as `ppo.evaluate`, where `ppo` is an imported module."""
    lost, judged = [], 0
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules = {name: full for name, full in imported_names(tree, ("trainer",)).items() if is_module(full)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                judged += 1
                if not hasattr(importlib.import_module(modules[node.value.id]), node.attr):
                    lost.append(f"{path.relative_to(ROOT)}:{node.lineno}: {modules[node.value.id]}.{node.attr}")
    assert judged > 50 and not lost, "\n".join(lost)


def test_ranges_of_setup_py_hold_the_tested_versions_and_not_those_that_failed():
    """torch 2.11 had no varlen_attn(enable_gqa=), and vllm 0.33 wants another torch. No network: check_extras.sh has it."""
    given: dict = {}
    tree = ast.parse((ROOT / "setup.py").read_text())
    code = compile(
        ast.fix_missing_locations(ast.Module([n for n in tree.body if not isinstance(n, ast.ImportFrom)], [])),
        "",
        "exec",
    )
    exec(code, {"setup": lambda **facts: given.update(facts), "find_packages": lambda **_: []})
    texts = [*given["install_requires"], *(text for extra in given["extras_require"].values() for text in extra)]
    ranges = [Requirement(text) for text in texts]
    allowed = {r.name: r.specifier for r in ranges}
    assert (
        "2.12.1" not in allowed["torch"] and "0.33.0" not in allowed["vllm"] and "5.15.0" not in allowed["transformers"]
    )
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    judged = [(r, pins[r.name]) for r in ranges if r.name in pins]
    assert len(judged) > 8 and all(version in r.specifier for r, version in judged), judged

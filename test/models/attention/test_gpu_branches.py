"""Whole trainings through the attention kernels of a GPU, run on CPU with kernels that check their arguments."""

import json
import os

import pytest
from launch import ROOT, read_steps, torchrun

from trainer.datasets.demos.demo import make_demo

PACKED = ["flash_2", "flash_2_zero_0", "flash_2_zero_2", "flash_3", "flash_3_selective"]
PACKED += ["varlen", "varlen_zero_0", "varlen_zero_2", "varlen_selective"]
RINGS = ["ring", "ring_torch", "ring_zero_0", "ring_package"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    make_demo(str(folder))
    path = os.pathsep.join([str(ROOT), str(ROOT / "test/flash_attn_shim"), os.environ.get("PYTHONPATH", "")])
    script = str(ROOT / "test/models/attention/gpu_branch_runs.py")
    code, output = torchrun(2, script, str(folder), timeout=500, PYTHONPATH=path)
    assert code == 0, output[-6000:]
    return folder


def num_calls(folder, name: str) -> dict[str, int]:
    return json.loads((folder / name / "kernels.json").read_text())


@pytest.mark.parametrize("name", [*PACKED, *RINGS, "flash_2_padded", "flash_3_padded", "varlen_recomputed"])
def test_losses_are_those_of_sdpa_and_kernels_get_half_precision(folder, name):
    if not (folder / name).exists():
        pytest.skip("ring-flash-attn is not installed")
    for found, expected in zip(read_steps(folder / name), read_steps(folder / "sdpa"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-3)
    calls = num_calls(folder, name)
    assert calls and all(kernel.endswith("torch.bfloat16") for kernel in calls), calls


@pytest.mark.parametrize("name", PACKED)
def test_each_layer_calls_its_kernel_once_per_pass(folder, name):
    """Two layers and two steps. `--selective_checkpointing` keeps the results of attention."""
    assert num_calls(folder, name) == {"varlen forward torch.bfloat16": 4, "varlen backward torch.bfloat16": 4}


def test_full_recomputation_calls_the_kernel_again(folder):
    found = num_calls(folder, "varlen_recomputed")
    assert found == {"varlen forward torch.bfloat16": 8, "varlen backward torch.bfloat16": 4}


def test_without_a_gpu_no_such_kernel_runs(folder):
    assert num_calls(folder, "sdpa") == {}

"""The CUDA build of torch without a card: docs/fake_gpu.md has every cell, and a sample runs where its environment is."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, run_process
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.planning.plan_memory import pinned_bytes, sizes_of

KIT = ROOT / "test/fake_gpu"
ENVIRONMENT = Path(os.environ.get("FAKE_GPU_ENVIRONMENT", ROOT / "build/fake_gpu_environment"))
sys.path.insert(0, str(KIT))

from cells import MOST_WAITS, all_cells  # noqa: E402


def test_the_page_has_every_cell_with_its_figures():
    lines = (ROOT / "docs/fake_gpu.md").read_text().split("## The cells")[1].splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    assert [row[0].strip().strip("`") for row in rows] == [cell.name for cell in all_cells()]
    assert len(rows) >= 120
    for row in rows:
        assert float(row[1]) <= (1e-5 if " fp32" in row[0] else 1e-2), row
        assert int(row[2]) <= MOST_WAITS.get(row[0].strip(" `"), math.inf), row
    assert MOST_WAITS.keys() <= {cell.name for cell in all_cells()}


@pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment of 7 GB"
)
def test_a_sample_of_cells_runs(tmp_path):
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), "--every", "16", "--folder", str(tmp_path)],
        timeout=900,
        FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT),
    )
    assert code == 0, output[-3000:]


@pytest.mark.skipif(not (ENVIRONMENT / "kernels").exists(), reason="test/fake_gpu/run.sh installs fla and liger-kernel")
def test_kernels_of_fla_and_liger_equal_their_formulas_in_tritons_interpreter():
    code, output = run_process(
        [str(ENVIRONMENT / "bin/python"), str(KIT / "interpreted.py")],
        timeout=300,
        PYTHONPATH=str(ENVIRONMENT / "kernels"),
    )
    assert code == 0, output[-3000:]
    found = json.loads(output.splitlines()[-1])
    assert len(found) == 6
    assert max(max(pair) for pair in found.values()) <= 1e-6, found


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
def test_pinned_memory_is_at_most_a_tenth_larger_than_needed():
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), "measure_memory.py"], timeout=300, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT)
    )
    assert code == 0, output[-3000:]
    found = json.loads(output.splitlines()[-1])
    needed, taken = found.pop("torch's own")
    assert taken > 1.2 * needed, "torch rounds up no more: then the pool can go"
    pairs = [*found["saves"], found["a frozen model"], found["activations"]]
    assert len(pairs) == 4 and all(needed <= taken <= 1.1 * needed for needed, taken in pairs), found


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
def test_offloading_pins_what_the_plan_says_and_waits_as_often_as_allowed(tmp_path):
    rows = tmp_path / "rows.json"
    flags = ["--only=--adam_offload fp32", "--folder", str(tmp_path / "cells"), "--out", str(rows)]
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), *flags], timeout=600, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT)
    )
    assert code == 0, output[-3000:]
    with torch.device("meta"):
        sizes = sizes_of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "cells/model")))
    held = [row for row in json.loads(rows.read_text()) if "fsdp2" in row["cell"]]
    assert len(held) == 2
    for row in held:  # weights, gradients, and gradients of a micro-batch
        planned = 3 * pinned_bytes(sizes, row["ranks"])
        assert planned <= row["pinned"] <= 1.1 * planned, row


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
def test_running_sums_need_not_leave_strict_mode():
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), "strict_mode.py"], timeout=120, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT)
    )
    assert code == 0 and "no refusal" in output, output[-3000:]


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
def test_the_ring_and_torchs_attention_call_flash_attention_3_and_get_its_numbers():
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), "flash_3.py"], timeout=120, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT)
    )
    assert code == 0 and "forward 3 backward 3" in output, output[-3000:]

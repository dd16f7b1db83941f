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

import memory_list  # noqa: E402
from cells import MOST_WAITS, NORM_TOLERANCE, TOLERANCE, all_cells  # noqa: E402


def test_the_record_and_the_page_have_every_cell_as_it_is_now():
    """A cell that trains something else than when it ran has another digest. run.sh --missing --record runs it again."""
    record = json.loads((KIT / "cells.json").read_text())
    assert {name: row["digest"] for name, row in record.items()} == {cell.name: cell.digest for cell in all_cells()}
    assert len(record) >= 180 and MOST_WAITS.keys() <= record.keys()
    lines = (ROOT / "docs/fake_gpu.md").read_text().split("## The cells")[1].splitlines()
    shown = {line.split("`")[1]: line.split("|")[2:-1] for line in lines if line.startswith("| `")}
    for cell in all_cells():
        row = record[cell.name]
        waits = sum(row["waits"].values())
        figures = f"{row['loss']:.0e}", f"{row['norm']:.0e}", str(waits), str(row["launches"]), f"{row['peak']:.0f}"
        assert tuple(map(str.strip, shown[cell.name])) == figures, cell.name
        assert row["loss"] <= TOLERANCE[cell.dtype] and row["norm"] <= NORM_TOLERANCE[cell.dtype], cell.name
        assert waits <= MOST_WAITS.get(cell.name, math.inf), cell.name
    assert shown.keys() == record.keys()


MEASURED = json.loads(memory_list.RECORD.read_text())


@pytest.mark.parametrize("cell", memory_list.all_cells(), ids=lambda cell: cell.name)
def test_plan_predicts_the_peak_that_torchs_allocator_had(cell):
    assert 1 / 1.1 <= memory_list.planned(cell).step / memory_list.MIB / MEASURED[cell.name]["step"] <= 1.1


def test_the_page_has_these_peaks():
    assert list(MEASURED) == [cell.name for cell in memory_list.all_cells()]
    assert memory_list.table(MEASURED) in memory_list.PAGE.read_text()


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
def test_a_cell_of_memory_runs(tmp_path):
    name = "sft 2 x fsdp2 3 sp 2 bf16"
    command = ["bash", str(KIT / "run.sh"), "memory_cells.py", "--only", name, "--folder", str(tmp_path)]
    code, output = run_process(command, timeout=600, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT))
    assert code == 0 and "1 cells, 0 bad" in output, output[-3000:]


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


PLANTED = {
    "policy": ("ppo 1 x fsdp2 bf16", "norm differs by"),
    "distance": ("kd 1 x fsdp2 bf16", "loss differs by"),
    "wait": ("sft 1 x fsdp2 fp32", "1 waits in test/fake_gpu/planted.py"),
    "full": ("sft 1 x fsdp2 bf16", "mm float32 in bf16"),
}


@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="test/fake_gpu/run.sh makes its environment")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_fails(fault, tmp_path):
    cell, told = PLANTED[fault]
    command = ["bash", str(KIT / "run.sh"), "--only", cell, "--plant", fault, "--folder", str(tmp_path)]
    code, output = run_process(command, timeout=300, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT))
    line = next(line for line in output.splitlines() if line.startswith(f"BAD {cell} "))
    assert code == 1 and told in line, output[-3000:]


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

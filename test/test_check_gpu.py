"""scripts/check_gpu.sh on a CPU: every part runs and finds nothing wrong, and what is wrong is told."""

import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, run_process

from scripts.check_gpu import PARTS, Feature, _judged, write_section

LIMIT = 1500  # seconds of all parts on a busy machine; they take 160 s of CPU


@pytest.fixture
def script(tmp_path) -> list[str]:
    """The script as it is, in a folder with this environment in place of .venv: it must install nothing here."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/check_gpu.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup_env.sh").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    os.symlink(ROOT / "scripts/check_gpu.py", tmp_path / "scripts/check_gpu.py")
    os.symlink(ROOT / "trainer", tmp_path / "trainer")
    return ["bash", str(tmp_path / "scripts/check_gpu.sh")]


def test_every_part_runs_on_a_cpu(script, tmp_path):
    code, output = run_process([*script, "--tiny", "--out", str(tmp_path / "gpu.md")], timeout=LIMIT)
    assert code == 0 and f"nothing is wrong: {tmp_path / 'gpu.md'}" in output, output[-4000:]
    page = (tmp_path / "gpu.md").read_text()
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")] == list(PARTS)
    assert "**wrong**" not in page
    for found in ("| packages |", "| test_cuda_kernels.py | ", "-packed-fp32, 1 rank | loss ", "-packed-bf16, 1 rank | loss ",
                  "| fsdp2, 1 rank, bf16 | 2 steps replayed, bitwise the same |", "| fsdp2-3-fp32, 1 rank, step | ", "| packed | loss ",
                  " of the products", " x TRL"):  # fmt: skip
        assert found in page, found


def test_what_is_wrong_is_told_and_other_tables_stay(script, tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(
        "# Mine\n\nWords.\n\n<!-- doctor of check_gpu -->\n\nold\n\n<!-- end of doctor -->\n\nMore words.\n"
    )
    command = [*script, "--tiny", "--part", "doctor", "--out", str(page)]
    code, output = run_process(command, timeout=300, CUDA_VISIBLE_DEVICES="0,99")
    assert code == 1 and "FAIL  doctor: visible GPUs: " in output and f"1 wrong: {page}" in output, output[-3000:]
    text = page.read_text()
    assert text.startswith("# Mine\n\nWords.\n\n<!-- doctor of check_gpu -->\n") and text.endswith("\n\nMore words.\n")
    assert "names 2 GPUs, torch sees" in text and text.count("**wrong**") == 1 and "old" not in text


def test_losses_of_features_are_judged():
    plain = [2.0, 1.9, 1.8]
    good, bad, nan = [2.001, 1.9, 1.8], [2.0, 1.9, 1.9], [2.0, math.nan, 1.8]
    every, first, dpo = Feature(""), Feature("", every_step=False), Feature("", first_loss=0.7, every_step=False)
    for feature, losses, fault in (
        (every, good, False), (every, bad, True), (every, nan, True), (every, [2.0], True), (every, [], True),
        (first, bad, False), (first, [2.1, 1.9], True), (dpo, [0.7, 0.1], False), (dpo, plain, True),
    ):  # fmt: skip
        assert _judged("x", feature, losses, plain, None).fault is fault, (feature, losses)
    assert _judged("x", every, plain, plain, "it crashed").fault


def test_without_a_gpu_it_says_so(script):
    code, output = run_process([*script, "--part", "doctor"], timeout=300, CUDA_VISIBLE_DEVICES="")
    assert (code, output.splitlines()[-1]) == (2, "error: no CUDA device here (allowed: --tiny, to check the script)")


def test_a_second_run_replaces_the_table(tmp_path):
    for text in ("first", "second"):
        write_section(tmp_path / "new.md", "speed", text)
        write_section(tmp_path / "new.md", "memory", text)
    content = (tmp_path / "new.md").read_text()
    assert content.startswith("# The trainer on this machine's GPUs\n")
    assert content.count("second") == 2 and "first" not in content

"""The memory of weights, gradients and optimizer states is the predicted one, on every backend and stage."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
from launch import ROOT, torchrun

from trainer.cli.predicted_memory import predict, table
from trainer.compare.measured_memory import GLIBC, RUNS, make_model

TOLERANCE = 0.1


@pytest.fixture(scope="module")
def folder():
    """A folder in memory: the checkpoints of all runs would take a disk minutes."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 4 << 30 else None
    with tempfile.TemporaryDirectory(dir=root) as name:
        yield Path(name) / "demo"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_is_the_predicted_one(num_ranks, folder):
    shutil.rmtree(folder, ignore_errors=True)
    num_params, layer = make_model(folder, width=384, layers=27)
    command = ["-m", "trainer.compare.measured_memory", str(folder), "cpu"]
    code, output = torchrun(num_ranks, *command, timeout=900, **GLIBC)
    assert code == 0, output[-6000:]
    found, wrong = json.loads((folder / f"peaks-{num_ranks}.json").read_text()), []
    for name in RUNS:
        backend, stage, dtype = name.split("-")
        for phase, expected in vars(predict(backend, int(stage), dtype, num_ranks, num_params, layer)).items():
            line = f"{name} {phase}: {found[name][phase] / num_params:.2f} bytes per parameter"
            line += f", predicted {expected / num_params:.2f}"
            print(line)
            wrong += [] if math.isclose(found[name][phase], expected, rel_tol=TOLERANCE) else [line]
    assert len(found) == len(RUNS) and not wrong, "\n".join(wrong)


def test_the_table_of_the_page_is_what_the_function_says():
    assert table(8) in (ROOT / "docs/layouts.md").read_text()

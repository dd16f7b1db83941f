"""QLoRA on a CPU: on every layout the plain loop of peft with bitsandbytes' own layers.

bitsandbytes is beside the environment, where scripts/setup_env.sh installs it: other tests start without it.
"""

import functools
import importlib.machinery
import os
import sys

import pytest
from launch import APART, FULL, ROOT, read_steps, run_process, torchrun, train_many
from test_lora import LAYOUTS, sft_line
from test_parity import assert_same_steps, assert_same_tensors

PATH = os.pathsep.join([str(ROOT), str(APART)])
pytestmark = pytest.mark.skipif(
    not importlib.machinery.PathFinder.find_spec("bitsandbytes", [str(APART), *sys.path]),
    reason="bitsandbytes is not installed: scripts/setup_env.sh does it",
)
# each run of train_sft: its layout and more flags
RUNS = {
    "z2-dp2": [],
    "fsdp2-sp2": [],
    "fsdp2-recompute": [],
    "fsdp2-compile": ["--compile"],
    "fsdp2-dp2-muon": ["--optim", "muon"],
    "z2-dp2-bf16": ["--param_dtype", "bf16"],
    "fsdp2-dp2-bf16": ["--param_dtype", "bf16"],
}
if FULL:
    RUNS |= {"fsdp2-dp2": [], "z0-dp2": [], "z1-dp2": [], "fsdp2-packed": [], "z2-recompute": []}
    RUNS |= {
        "fsdp2-recompute-bf16": ["--param_dtype", "bf16"],
        "fsdp2-compile-bf16": ["--param_dtype", "bf16", "--compile"],
    }
IN_FP32 = [name for name in RUNS if not name.endswith("bf16")]


def line_of(name, folder, data, *more):
    backend, layout = name.split("-")[:2]
    # a pass in eval mode changes no weight
    more = [*more, "--eval_steps", "1", "--eval_dataset", f"{data}/gsm8k/train.jsonl"]
    of_layout = f"{backend}-{layout if layout in LAYOUTS else 'dp2'}"
    return sft_line(of_layout, folder, data, "--load_in_4bit", "--max_steps", "3", "--device", "cpu", *more, run=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with all runs and the two plain loops."""
    folder = tmp_path_factory.mktemp("qlora")
    for name, flags in (("reference", []), ("reference-muon", ["--optim", "muon"])):
        line = sft_line("reference", folder, shared_data, "--load_in_4bit", "--max_steps", "3", *flags, run=name)
        code, output = run_process([sys.executable, str(ROOT / "test/reference.py"), *line], PYTHONPATH=PATH)
        assert code == 0, output[-4000:]
    lines = [["train_sft", *line_of(name, folder, shared_data, *flags)] for name, flags in RUNS.items()]
    lines.append(["train_sft", *sft_line("z2-dp2", folder, shared_data, "--max_steps", "1", run="whole")])
    train_many(2, lines, folder, timeout=900, launch=functools.partial(torchrun, PYTHONPATH=PATH))
    return folder


@pytest.mark.parametrize("name", IN_FP32)
def test_a_run_equals_the_plain_loop_of_peft(runs, name):
    reference = runs / ("reference-muon" if name.endswith("muon") else "reference")
    assert len(read_steps(runs / name)) == 3
    assert_same_steps(runs / name, reference, 1e-5, 1e-4)
    assert_same_tensors(runs / name, reference, "weights_final", 1e-4)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in IN_FP32])
def test_a_bf16_run_stays_near_the_plain_fp32_loop(runs, name):
    assert_same_steps(runs / name, runs / "reference", 1e-2, 2e-2)
    losses = [[row["loss"] for row in read_steps(runs / run)] for run in (name, "reference")]
    assert losses[0] != losses[1], "nothing is rounded"


def test_the_frozen_layers_are_rounded(runs):
    whole, four = (read_steps(runs / name)[0]["loss"] for name in ("whole", "z2-dp2"))
    assert abs(whole - four) > 1e-3 * whole

"""Tensor parallelism and hybrid sharding against the plain loop, on real data with a really trained model.

The tolerances are those of test_parity.py: SPEC section 4, for 20 steps, the gradients of step 1 and the final weights.
"""

import sys

import pytest
from launch import ROOT, read_rows, read_steps, run_process, torchrun, train_many
from test_parity import assert_same_steps, assert_same_tensors, command_line

TWO_MICRO_BATCHES = ["--micro_train_batch_size", "8"]  # per step and rank, as with dp 2
LAYOUTS = {
    2: {
        "fsdp2-tp2": ["--tensor_parallel_size", "2", *TWO_MICRO_BATCHES],
        "fsdp2-tp2-sequence": ["--tensor_parallel_size", "2", "--sequence_parallel", *TWO_MICRO_BATCHES],
    },
    4: {
        "fsdp2-tp4": ["--tensor_parallel_size", "4", *TWO_MICRO_BATCHES],
        "fsdp2-dp2-tp2": ["--tensor_parallel_size", "2", "--check_replicas_every", "5"],
        "fsdp2-hsdp2-dp2": ["--dp_replicate_size", "2", "--check_replicas_every", "5"],
        "fsdp2-hsdp2-tp2": ["--dp_replicate_size", "2", "--tensor_parallel_size", "2", "--use_hf_tp_plan"],
    },
}
NAMES = [f"{layout}-{packed}" for layouts in LAYOUTS.values() for layout in layouts for packed in ("packed", "padded")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with the finished runs of every layout, packed and padded, and of the plain loop."""
    folder = tmp_path_factory.mktemp("parity_tp")
    reference = [sys.executable, str(ROOT / "test/reference.py"), *command_line("reference", folder, shared_data)]
    code, output = run_process(reference)
    assert code == 0, output[-4000:]
    for num_ranks, layouts in LAYOUTS.items():
        lines = [
            command_line(f"{layout}-{packed}", folder, shared_data) + flags
            for layout, flags in layouts.items()
            for packed in ("packed", "padded")
        ]
        train_many(num_ranks, lines, folder, timeout=900)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_fp32_run_equals_the_plain_loop(runs, name):
    assert len(read_steps(runs / name)) == 20
    assert_same_steps(runs / name, runs / "reference", 1e-5, 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "grads_step1", 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "weights_final", 1e-4)


def test_the_runs_had_the_mesh_that_their_names_say(runs):
    assert read_rows(runs / "fsdp2-tp4-packed")[0]["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 4}
    assert read_rows(runs / "fsdp2-hsdp2-tp2-packed")[0]["mesh"] == {
        "dp_replicate": 2, "dp_shard": 1, "sp": 1, "tp": 2,
    }  # fmt: skip


def test_a_size_that_the_heads_do_not_allow_is_one_line(tmp_path, shared_data):
    line = [*command_line("fsdp2-wrong", tmp_path, shared_data), "--tensor_parallel_size", "3"]
    code, output = torchrun(3, "-m", "trainer.cli.train_sft", *line)
    assert code != 0 and "Traceback (most recent call last)" not in output.split("error: ")[0]
    assert "error: --tensor_parallel_size: 3 does not divide every one of num_attention_heads 8" in output
    assert "(allowed: 1, 2, 4)" in output

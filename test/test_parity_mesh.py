"""Tensor, sequence and hybrid parallelism against the plain loop, on real data with a really trained model.

The layouts are those of `compare_backends.py --run full`, of which this is a part: each axis on both backends, and
pairs of axes, packed or padded in turn; `PARITY=full` adds three axes on eight ranks. The tolerances are those of test_parity.py; the sentinel compares replicas bit by bit on the way.
"""

import json

import pytest
from launch import FULL, ROOT, forked, read_rows, read_steps, train_many
from test_parity import assert_same_steps, assert_same_tensors, command_line

from trainer.compare.runs.matrix import full_matrix

TWO_RANKS = {
    "deepspeed-z1-tp2-packed", "fsdp2-tp2-seq", "deepspeed-z3-sp2-packed", "fsdp2-sp2", "fsdp2-ulysses2-packed",
}  # fmt: skip
FOUR_RANKS = {"fsdp2-tp2-sp2", "deepspeed-z2-dp2-sp2-packed", "deepspeed-z3-hsdp2x2"}
EIGHT_RANKS = {"deepspeed-z3-dp2-tp2-sp2-packed", "fsdp2-hsdp2x2-tp2"} if FULL else set()
STEPS = 4
MATRIX = {c.name: c for c in full_matrix() if c.name in TWO_RANKS | FOUR_RANKS | EIGHT_RANKS}


def micro(name: str) -> list[str]:
    """Hybrid layouts get two micro-batches a step: replicas add up their gradients after the last one."""
    return ["--micro_train_batch_size", "1"] if "hsdp" in name else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with the finished runs, and of the plain loop."""
    folder = tmp_path_factory.mktemp("parity_mesh")
    max_steps = ["--max_steps", str(STEPS), "--lr_scheduler", "constant_with_warmup"]
    reference = command_line("reference", folder, shared_data) + max_steps
    code, output = forked(1, str(ROOT / "test/reference.py"), *reference)
    assert code == 0, output[-4000:]
    for num_ranks in (2, 4, 8) if FULL else (2, 4):
        lines = [
            [*command_line(name, folder, shared_data), *max_steps, *c.args, "--check_replicas_every", "2", *micro(name)]
            for name, c in MATRIX.items()
            if c.nproc == num_ranks
        ]
        train_many(num_ranks, lines, folder, timeout=1200)
    return folder


def test_the_matrix_has_every_configuration_of_this_test():
    assert MATRIX.keys() == TWO_RANKS | FOUR_RANKS | EIGHT_RANKS


@pytest.mark.parametrize("name", MATRIX)
def test_fp32_run_equals_the_plain_loop(runs, name):
    assert len(read_steps(runs / name)) == STEPS
    assert_same_steps(runs / name, runs / "reference", 1e-5, 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "grads_step1", 1e-4)
    assert_same_tensors(runs / name, runs / "reference", "weights_final", 1e-4)


def test_the_runs_had_the_mesh_that_their_names_say(runs):
    def mesh(name):
        return tuple(read_rows(runs / name)[0]["mesh"].values())  # dp_replicate, dp_shard, sp, tp

    assert mesh("fsdp2-tp2-sp2") == (1, 1, 2, 2)
    assert mesh("deepspeed-z2-dp2-sp2-packed") == (1, 2, 2, 1)
    assert mesh("deepspeed-z3-hsdp2x2") == (2, 2, 1, 1)
    assert not FULL or mesh("deepspeed-z3-dp2-tp2-sp2-packed") == (1, 2, 2, 2)
    assert not FULL or mesh("fsdp2-hsdp2x2-tp2") == (2, 2, 1, 2)


REFUSED = {
    "heads": (
        ["--tensor_parallel_size", "3"],
        "--tensor_parallel_size: 3 does not divide intermediate_size 172",
    ),
    "sequence without tp": (["--sequence_parallel"], "--sequence_parallel with --tensor_parallel_size 1"),
    "ulysses heads": (["--ring_attn_size", "3", "--sp_mode", "ulysses"], "--sp_mode: ulysses over 3 ranks"),
    "ulysses without sp": (["--sp_mode", "ulysses"], "--sp_mode ulysses with --ring_attn_size 1"),
    "eager ring": (
        ["--ring_attn_size", "3", "--attn_implementation", "eager"],
        "--attn_implementation eager with --ring_attn_size 3",
    ),
    "ranks": (["--dp_replicate_size", "2"], "does not divide the number of ranks, 3"),
    "autotp": (["--backend", "deepspeed", "--tensor_parallel_size", "3", "--sequence_parallel"], "--sequence_parallel"),
    "hybrid zero 2": (["--backend", "deepspeed", "--zero_stage", "2", "--dp_replicate_size", "3"], "--zero_stage 3"),
}


def test_layouts_that_cannot_work_are_one_line_each(tmp_path, shared_data):
    lines = [
        [*command_line(f"fsdp2-wrong-{n}", tmp_path, shared_data), *flags]
        for n, (flags, _) in enumerate(REFUSED.values())
    ]
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    code, output = forked(3, "-m", "trainer.compare.runs.many_runs", str(tmp_path / "lines.json"))
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code != 0 and "step 1/" not in output
    for name, (_, expected) in REFUSED.items():
        assert any(expected in line for line in errors), (name, errors)

"""compare_backends.py --run: which configurations there are, how they are launched and ended, and what is reported."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from compare_files import LOSSES, changed, error_line, write_dump, write_metrics

from compare_backends import main
from trainer.compare.runs.comparison_report import (
    MARKERS,
    MEASURED,
    check_markers,
    configuration_line,
    matrix_markdown,
    write_between_markers,
)
from trainer.compare.runs.launch import (
    Job,
    Outcome,
    configuration_job,
    error_of_run,
    kill_tree,
    last_error,
    reference_job,
    run_jobs,
    training_command,
)
from trainer.compare.runs.logs import Run, read_run
from trainer.compare.runs.many_runs import RUN_BEGINS
from trainer.compare.runs.matrix import (
    QUICK,
    Configuration,
    full_matrix,
    given_param_dtype,
    load_matrix,
    matrix_thresholds,
)
from trainer.compare.runs.plots import plot_matrix
from trainer.compare.runs.run_matrix import assess
from trainer.errors import UserError

# --- matrices ---------------------------------------------------------------------------------------------------------


def test_the_full_matrix_is_the_product_of_its_axes():
    matrix = full_matrix()
    assert len(matrix) == 40 + 72 + 8 + 2
    assert len({c.name for c in matrix}) == len({(c.nproc, c.args) for c in matrix}) == len(matrix)
    assert {c.nproc for c in matrix} == {1, 2, 4, 8}
    packed = next(c for c in matrix if c.name == "deepspeed-z2-2r-mb4-packed")
    assert packed.nproc == 2
    assert " ".join(packed.args) == ("--backend deepspeed --zero_stage 2 --micro_train_batch_size 4 --packing_samples")


def test_the_quick_matrix_and_only():
    assert sorted(c.name for c in load_matrix("quick")) == sorted(QUICK)
    assert len(load_matrix("full", "^fsdp2-[12]r.*packed$")) == 4


def write_matrix(path, text):
    path.write_text(text)
    return str(path)


def test_a_matrix_is_read_from_yaml(tmp_path):
    path = write_matrix(
        tmp_path / "m.yaml",
        'configurations:\n  - {name: a.b-2r, nproc: 2, args: [--backend, fsdp2, --x, "4", --y, 5]}\n',
    )
    assert load_matrix(path) == [Configuration("a.b-2r", 2, ("--backend", "fsdp2", "--x", "4", "--y", "5"))]


@pytest.mark.parametrize(
    "text",
    [
        "configurations:\n  - {name: a, nproc: 1, args: [], nprocs: 2}",
        "configurations:\n  - {name: a, args: []}",
        "configurations: []",
        "configurations: [a]",
        "configs: []",
        "- {name: a, nproc: 1, args: []}",
        "configurations: [",
        "configurations:\n  - {name: a/b, nproc: 1, args: []}",
        "configurations:\n  - {name: reference, nproc: 1, args: []}",
        "configurations:\n  - {name: a, nproc: 0, args: []}",
        "configurations:\n  - {name: a, nproc: true, args: []}",
        "configurations:\n  - {name: a, nproc: 1, args: --backend}",
        "configurations:\n  - {name: a, nproc: 1, args: [--packing_samples, true]}",
        "configurations:\n  - {name: a, nproc: 1, args: [--output_dir, x]}",
        "configurations:\n  - {name: a, nproc: 1, args: []}\n  - {name: a, nproc: 2, args: []}",
    ],
)
def test_a_wrong_matrix_is_an_error(tmp_path, text):
    with pytest.raises(UserError, match=r"m\.yaml"):
        load_matrix(write_matrix(tmp_path / "m.yaml", text))


def test_thresholds_of_a_matrix_depend_on_the_dtype():
    fp32, bf16 = (matrix_thresholds(dtype, None, None, None) for dtype in ("fp32", "bf16"))
    assert (fp32.loss, fp32.grad_norm, fp32.dump) == (1e-5, pytest.approx(1e-4), 1e-4)
    assert (bf16.loss, bf16.grad_norm, bf16.dump) == (1e-2, None, None)
    given = matrix_thresholds("bf16", 1e-3, 1e-2, 0.0)
    assert (given.loss, given.grad_norm, given.dump) == (1e-3, 1e-2, 0.0)
    assert given_param_dtype(["--param_dtype", "bf16", "--param_dtype=fp16"]) == "fp16"
    assert given_param_dtype(["--seed", "1"]) is None


# --- launching --------------------------------------------------------------------------------------------------------


def test_command_lines(tmp_path, monkeypatch):
    configuration = Configuration("a-2r", 2, ("--backend", "fsdp2", "--param_dtype", "bf16"))
    command = training_command(configuration, ["--seed", "1"], tmp_path, 2345)
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "2345"),
        *("-m", "trainer.cli.train_sft", "--seed", "1", "--backend", "fsdp2", "--param_dtype", "bf16"),
        *("--output_dir", f"{tmp_path}/a-2r", "--parity_dump", f"{tmp_path}/a-2r/parity"),
    ]
    reference = reference_job(["--seed", "1"], tmp_path).command()
    assert reference[1:6] == ["test/reference.py", "--seed", "1", "--param_dtype", "fp32"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one, two = (configuration_job(Configuration("a", n, ()), [], tmp_path).environment for n in (1, 2))
    assert "OMP_NUM_THREADS" not in one and two["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert configuration_job(configuration, [], tmp_path).environment["OMP_NUM_THREADS"] == "3"


def python_job(tmp_path, name, code):
    return Job(name, lambda: [sys.executable, "-c", code], tmp_path / f"{name}.log", dict(os.environ))


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_jobs_run_side_by_side_and_their_last_error_is_told(tmp_path):
    good = python_job(tmp_path, "good", "print('fine')")
    bad = python_job(tmp_path, "bad", "raise ValueError('no such thing')")
    outcomes = {job.name: outcome for job, outcome in run_jobs([good, bad], tmp_path, 2, 60)}
    assert outcomes["good"].error is None and (tmp_path / "good.log").read_text() == "fine\n"
    assert outcomes["bad"].error == "ValueError: no such thing"


STUBBORN_CHILD = (  # as torchrun's ranks are: in a session of its own; and deaf to SIGTERM
    "import signal, subprocess, sys, time\n"
    "child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'"
    "\n"
    "process = subprocess.Popen([sys.executable, '-c', child], start_new_session=True, stdout=subprocess.PIPE)\n"
    "process.stdout.read(1)\n"
    "print(process.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def test_a_timeout_ends_the_whole_tree(tmp_path):
    job = python_job(tmp_path, "slow", STUBBORN_CHILD)
    [(_, outcome)] = run_jobs([job], tmp_path, 1, 2.0)
    assert outcome.error == "timed out after 2 s"
    assert wait_until_gone(int(job.log.read_text()))


def test_leaving_the_launcher_early_ends_what_still_runs(tmp_path):
    running = run_jobs(
        [python_job(tmp_path, "good", ""), python_job(tmp_path, "slow", STUBBORN_CHILD)], tmp_path, 2, 60
    )
    assert next(running)[0].name == "good"
    log = tmp_path / "slow.log"
    while not log.read_text().endswith("\n"):
        time.sleep(0.02)
    running.close()
    assert wait_until_gone(int(log.read_text()))


def test_kill_tree_of_a_process_that_ended_is_harmless():
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    kill_tree(process)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("error: --bad: is bad\n[rank0]: RuntimeError: Connection closed by peer\n====\n", "--bad: is bad"),
        (
            "[rank1]: ValueError: x\n[rank0]: RuntimeError: Connection closed by peer [1]\nChildFailedError: \n",
            "ValueError: x",
        ),
        ("E1 api.py] failed (exitcode: -9) local_rank: 1\nx.ChildFailedError: \n", "a rank ended with exit code -9"),
        ("something odd\n\n", "something odd"),
        ("", "exit code 3, and an empty log"),
    ],
)
def test_the_line_that_says_why_is_found(tmp_path, log, told):
    (tmp_path / "a.log").write_text(log)
    assert last_error(tmp_path / "a.log", 3) == told


def test_each_run_of_a_shared_launch_is_told_its_own_error(tmp_path):
    """A refusal of tp must not be printed under the ring configuration that comes after it."""
    log = tmp_path / "2-ranks.log"
    refused = "error: --tensor_parallel_size: 3 does not divide heads [--tensor_parallel_size 3]"
    runs = [f"{RUN_BEGINS.format(number)}\n" for number in range(3)]
    log.write_text(f"{runs[0]}{refused}\n{runs[1]}step 1/2\n{runs[2]}RuntimeError: no ring\nRuntimeError: no ring\n")
    assert error_of_run(log, 0) == refused.removeprefix("error: ")
    assert error_of_run(log, 2) == "RuntimeError: no ring"
    assert error_of_run(log, 3) is None


def test_a_matrix_whose_plain_loop_fails_is_an_error(tmp_path, capsys, signals_kept):
    matrix = write_matrix(tmp_path / "m.yaml", "configurations:\n  - {name: a, nproc: 1, args: []}")
    out = str(tmp_path / "out")
    assert main(["--run", matrix, "--output_dir", out, "--timeout", "60", "--", "--no_such_flag", "1"]) == 2
    assert error_line(capsys).startswith("error: the plain loop: ")
    assert (tmp_path / "out" / "reference.log").stat().st_size > 0
    assert main(["--run", matrix, "--output_dir", out, "--", "--seed", "1"]) == 2
    assert "is not empty" in error_line(capsys)


# --- the report of a matrix -------------------------------------------------------------------------------------------


@pytest.fixture
def signals_kept():
    """main --run installs a SIGTERM handler, which must not outlive a test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def assess_one(tmp_path, losses, dtype="fp32", error=None, weights=None):
    write_metrics(tmp_path / "reference" / "metrics.jsonl")
    write_dump(tmp_path / "reference" / "parity")
    if losses:
        write_metrics(tmp_path / "a" / "metrics.jsonl", losses)
        write_dump(tmp_path / "a" / "parity", weights)
    reference = read_run("reference", tmp_path / "reference")
    return assess(
        Configuration("a", 2, ("--x",)),
        Outcome(1.5, error),
        reference,
        tmp_path,
        dtype,
        lambda dtype: matrix_thresholds(dtype, None, None, None),
    )


def test_a_configuration_passes_only_with_the_curve_and_the_weights_of_the_reference(tmp_path):
    entry, run = assess_one(tmp_path, LOSSES)
    assert entry["passed"] and entry["error"] is None and len(run.steps) == 4
    assert set(MEASURED) | {"name", "nproc", "args", "param_dtype", "seconds", "passed", "error"} == set(entry)
    entry, _ = assess_one(tmp_path, LOSSES, weights=changed("lm_head.weight", 1.01))
    assert not entry["passed"] and entry["worst_weight"]["name"] == "lm_head.weight"
    entry, _ = assess_one(tmp_path, LOSSES, weights={"model.norm.weight": torch.ones(4)})
    assert not entry["passed"] and "lacks lm_head.weight" in entry["error"] and entry["max_rel_loss"] == 0.0


def test_bf16_is_judged_by_its_loss_alone_and_known_from_the_log_where_no_flag_says_it(tmp_path):
    off = [1.005 * loss for loss in LOSSES]
    for dtype in ("bf16", None):  # the log of the run begins with a configuration in bf16
        entry, _ = assess_one(tmp_path, off, dtype, weights=changed("lm_head.weight", 1.01))
        assert entry["passed"] and entry["param_dtype"] == "bf16"
    entry, _ = assess_one(tmp_path, off, "fp32")
    assert not entry["passed"] and "the loss at step" in entry["error"]


def test_a_configuration_that_failed_or_left_no_log_does_not_pass(tmp_path):
    entry, run = assess_one(tmp_path, None, error="timed out after 2 s")
    assert (entry["passed"], entry["error"], run) == (False, "timed out after 2 s", None)
    assert set(entry) == set(assess_one(tmp_path / "other", LOSSES)[0])
    entry, run = assess_one(tmp_path, None)
    assert not entry["passed"] and "no such file" in entry["error"] and run is None
    entry, _ = assess_one(tmp_path, LOSSES, error="ValueError: at the very end")
    assert not entry["passed"]


def test_the_reports_of_a_matrix_show_passed_and_failed_configurations(tmp_path):
    good, run = assess_one(tmp_path / "1", LOSSES)
    bad, _ = assess_one(tmp_path / "2", None, error="a | b")
    bad["name"] = "broken"
    report = {
        "reference": {"name": "reference", "steps": 4, "seconds": 1.0},
        "train_args": ["--seed", "1"],
        "thresholds": {"fp32": {"loss": 1e-5, "grad_norm": 1e-4, "dump": 1e-4}},
        "configurations": [good, bad],
        "passed": False,
    }
    rows = [line for line in matrix_markdown(report).splitlines() if line.startswith("|")]
    assert rows[2].endswith("| yes | 2 | pass |") and rows[3].endswith("| **FAIL** a \\| b |")
    assert "**1 of 2 configurations pass**" in matrix_markdown(report)
    assert configuration_line(good).startswith("PASS a (2 s): loss 0.0e+00")
    assert configuration_line(bad) == "FAIL broken (2 s): a | b"
    plot_matrix(tmp_path / "report.png", Run("reference", run.steps), [run], report)
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_a_table_replaces_what_stands_between_the_markers_and_nothing_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n")
    check_markers(str(path))
    for table in ("| a |\n", "| b |\n"):
        write_between_markers(str(path), table)
        assert path.read_text() == f"before\n{MARKERS[0]}\n\n{table}\n{MARKERS[1]}\nafter\n"
    path.write_text("no markers")
    with pytest.raises(UserError, match="lacks the markers"):
        check_markers(str(path))

"""Runs that train nothing, or whose weights break, end with one line, and save no model."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from launch import in_fork, read_steps
from safetensors.torch import load_file, save_file

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.metrics import counted, step_line
from trainer.training.checkpointing import Progress
from trainer.training.loop import LoopOptions, StepLog, check_applied


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("not_finite")
    make_demo(str(folder / "demo"))
    shutil.copytree(folder / "demo/model", folder / "broken")
    weights = load_file(folder / "broken/model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "broken/model.safetensors", {"format": "pt"})
    return folder


def sft(folder, name: str, model: str, *more: str):
    """(code, output, rows of steps) of a short run."""
    line = ["--pretrain", f"{folder}/{model}", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
    line += ["--max_samples", "8", "--train_batch_size", "4", "--micro_train_batch_size", "4", "--max_epochs", "2"]
    line += ["--param_dtype", "fp32", "--output_dir", f"{folder}/{name}", *more]
    code, output = in_fork("-m", "trainer.cli.train_sft", *line)
    return code, output, read_steps(folder / name)


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_no_step_is_applied(folder, backend):
    code, output, rows = sft(folder, backend, "broken", "--backend", backend)
    assert code == 2 and "error: step 4: loss or gradient norm not finite in the last 4 of 4 steps" in output, output[
        -2000:
    ]
    assert len(rows) == 4 and not (folder / backend / "model").exists()
    assert output.count("| skipped: not finite") == 4


def test_an_evaluation_that_is_not_finite_ends_the_run(folder):
    evaluated = ["--eval_dataset", f"{folder}/demo/sft_eval.jsonl", "--eval_steps", "1"]
    code, output, rows = sft(folder, "evaluated", "broken", *evaluated)
    assert code == 2 and "error: step 1: the evaluation gives eval_loss nan" in output, output[-2000:]
    assert len(rows) == 1 and not (folder / "evaluated/model").exists()


def test_steps_that_follow_a_broken_update(folder):
    code, output, rows = sft(folder, "far", "demo/model", "--learning_rate", "1e30")
    assert code == 2 and "in the last 3 of 4 steps, so no model is saved" in output, output[-2000:]
    assert len(rows) == 4 and not (folder / "far/model").exists()


def test_a_batch_larger_than_the_data_is_said_and_trains(folder):
    code, output, rows = sft(folder, "few", "demo/model", "--train_batch_size", "128", "--max_epochs", "1")
    assert code == 0, output[-2000:]
    assert "--train_batch_size 128 is larger than the data: each pass has one batch of 8 samples" in output
    size = (folder / "demo/model/model.safetensors").stat().st_size
    assert output.index(f"\nloading --pretrain {folder}/demo/model: {size / 1e6:.1f} MB\n") < output.index("step 1/1")
    base, trained = (load_file(folder / name / "model.safetensors") for name in ("demo/model", "few/model"))
    assert len(rows) == 1 and any(not torch.equal(base[name], trained[name]) for name in base)


@pytest.mark.parametrize(
    ("steps", "skipped", "last", "fails"),
    [(1, 1, 1, True), (5, 4, 4, True), (2, 1, 1, True), (5, 1, 1, False), (9, 5, 0, False), (3, 0, 0, False), (0, 0, 0, False)],
)  # fmt: skip
def test_which_endings_are_refused(steps, skipped, last, fails):
    progress = Progress(step=steps, skipped_steps=skipped, skipped_in_a_row=last)
    if not fails:
        return check_applied(progress)
    with pytest.raises(UserError, match=f"in the last {last} of {counted(steps, 'step')}, so"):
        check_applied(progress)


def test_the_line_of_a_step_says_that_it_was_skipped():
    row = {"step": 1, "epoch": 0, "loss": 2.0, "grad_norm": float("nan"), "lr": 1e-5, "tokens": 7}
    row |= {"step_time": 0.5, "tokens_per_second": 14.0}
    assert step_line(row | {"skipped": True}, 9).endswith("| skipped: not finite")
    assert "skipped" not in step_line(row, 9)


@pytest.mark.parametrize(
    ("rows", "named"),
    [([(0.0, 1e-5)], True), ([(1.0, 0.0), (0.0, 1e-5)], True), ([(0.0, 1e-5), (1.0, 1e-5)], False), ([], False)],
)
def test_a_run_without_any_gradient_or_rate_says_so(rows, named):
    """As in RL where all responses to each prompt have one score, or where the policy is frozen in all steps."""
    printed, progress = [], Progress(step=7)  # it was resumed
    strategy = SimpleNamespace(is_rank_0=lambda: False, print=printed.append)
    log = StepLog(strategy, None, LoopOptions(total_steps=9, check_replicas_every=None), progress)
    for step, (grad_norm, lr) in enumerate(rows, start=8):
        log.after_step(None, {"step": step, "grad_norm": grad_norm, "lr": lr, "peak_memory_bytes": 0}, None)
    log.end()
    expected = (
        f"WARNING: {counted(len(rows), 'step')} had no gradient or no learning rate, so this run has trained nothing"
    )
    assert printed == ([expected] if named else [])

"""compare_backends.py: equal runs pass, different runs fail, and what cannot be compared is an error, never a pass."""

import json
import subprocess
import sys

import pytest
import torch
from compare_files import (
    END,
    LOSSES,
    ROOT,
    START,
    changed,
    error_line,
    step_row,
    write_dump,
    write_metrics,
    write_rows,
)

from compare_backends import main
from trainer.compare.runs.logs import Step, read_run
from trainer.compare.runs.parity import mean_and_bias


def compare(a, b, *more):
    return main(["--deepspeed_log", str(a), "--fsdp2_log", str(b), *more])


# --- two logs ---------------------------------------------------------------------------------------------------------


def test_equal_runs_pass_and_different_runs_fail_as_a_command(tmp_path):
    a, b = write_metrics(tmp_path / "a.jsonl"), write_metrics(tmp_path / "b.jsonl", [2.5, 2.25, 2.3, 1.75])
    command = [sys.executable, str(ROOT / "compare_backends.py"), "--deepspeed_log", a, "--fsdp2_log"]
    same = subprocess.run([*command, a], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (same.returncode, same.stdout.splitlines()[-1], same.stderr) == (0, "PASS", "")
    different = subprocess.run([*command, b], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (different.returncode, different.stdout.splitlines()[-1]) == (1, "FAIL")
    assert "the loss at step 3 differs by 0.15, over the threshold 0.05" in different.stdout


def test_help_imports_no_heavy_package():
    code = (
        "import sys, compare_backends\n"
        "try: compare_backends.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'matplotlib', 'safetensors', 'numpy', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr


@pytest.mark.parametrize(("loss", "code"), [(2.5, 0), (2.50001, 1), (1.5, 0), (1.49999, 1)])
def test_a_difference_of_exactly_the_threshold_passes_and_a_larger_one_fails(tmp_path, loss, code):
    a, b = write_metrics(tmp_path / "a.jsonl", [2.0]), write_metrics(tmp_path / "b.jsonl", [loss])
    assert compare(a, b, "--threshold", "0.25") == code


def test_threshold_zero_asks_for_bitwise_equality(tmp_path):
    a, b = write_metrics(tmp_path / "a.jsonl", [2.0]), write_metrics(tmp_path / "b.jsonl", [2.0000000000000004])
    assert compare(a, a, "--threshold", "0") == 0
    assert compare(a, b, "--threshold", "0") == 1


def test_the_deepspeed_log_is_the_reference(tmp_path):
    """4 is 100 % over 2; 2 is 50 % under 4."""
    a, b = write_metrics(tmp_path / "a.jsonl", [2.0]), write_metrics(tmp_path / "b.jsonl", [4.0])
    assert compare(a, b, "--threshold", "0.6") == 1
    assert compare(b, a, "--threshold", "0.6") == 0
    assert compare(a, b, "--threshold", "0.6", "--reference", "fsdp2") == 0


def test_the_grad_norm_is_judged_by_ten_times_the_loss_threshold_unless_told_otherwise(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", [2.0, 2.0], [1.0, 1.0])
    b = write_metrics(tmp_path / "b.jsonl", [2.0, 2.0], [1.0, 1.25])
    assert compare(a, b, "--threshold", "0.025") == 0
    assert compare(a, b, "--threshold", "0.02") == 1
    assert compare(a, b, "--threshold", "0.02", "--grad_norm_threshold", "0.3") == 0


def test_a_zero_loss_differs_from_any_other(tmp_path):
    a, b = write_metrics(tmp_path / "a.jsonl", [0.0]), write_metrics(tmp_path / "b.jsonl", [1e-30])
    out = tmp_path / "out.json"
    assert compare(a, a) == 0
    assert compare(a, b, "--json", str(out), "--plot", str(tmp_path / "out.png")) == 1
    assert json.loads(out.read_text())["comparisons"][0]["max_rel_loss"] == "inf"


def test_json_and_plot_hold_the_comparison(tmp_path):
    a = write_metrics(tmp_path / "a.jsonl", LOSSES, [1.0, 1.0, 1.0, 1.0])
    write_metrics(tmp_path / "b" / "metrics.jsonl", [2.5, 2.25, 2.0, 1.925], [1.0, 0.5, 1.0, 1.0])
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    assert compare(a, tmp_path / "b", "--json", str(out), "--plot", str(png)) == 1
    report = json.loads(out.read_text())
    entry = report["comparisons"][0]
    assert (report["reference"], report["passed"], entry["name"], entry["steps"]) == ("deepspeed", False, "fsdp2", 4)
    assert (entry["max_rel_loss_step"], entry["max_rel_grad_norm_step"]) == (4, 2)
    assert entry["max_rel_loss"] == pytest.approx(0.1) and entry["max_rel_grad_norm"] == 0.5
    assert [row["loss"] for row in entry["rows"]] == [2.5, 2.25, 2.0, 1.925]
    assert entry["batch_hash_equal"] is True and entry["biased"] is None
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_different_data_fails_and_the_step_is_named(tmp_path, capsys):
    a = write_rows(tmp_path / "a.jsonl", [START, *(step_row(i, 2.0) for i in (1, 2, 3))])
    b = write_rows(tmp_path / "b.jsonl", [START, step_row(1, 2.0), step_row(2, 2.0, batch_hash="x"), step_row(3, 2.0)])
    assert compare(a, b) == 1
    assert "batch_hash differs first at step 2" in capsys.readouterr().out


def test_any_number_of_logs_against_a_named_reference(tmp_path, capsys):
    paths = {name: write_metrics(tmp_path / name, [2.0 * factor]) for name, factor in (("x", 1), ("y", 1.5), ("z", 1))}
    logs = [f"{name}={path}" for name, path in paths.items()]
    assert main(["--logs", *logs, "--reference", "z"]) == 1
    out = capsys.readouterr().out
    assert "PASS x" in out and "FAIL y" in out and "x against z" in out
    assert main(["--logs", logs[0], logs[2]]) == 0


def test_a_long_table_keeps_the_first_the_last_and_the_largest(tmp_path, capsys):
    losses = [2.0] * 100
    losses[56] = 2.01
    a, b = write_metrics(tmp_path / "a.jsonl", [2.0] * 100), write_metrics(tmp_path / "b.jsonl", losses)
    assert compare(a, b, "--max_rows", "8") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [int(row[0]) for row in rows if len(row) == 7 and row[0].isdigit()]
    assert len(shown) == 8 and {1, 57, 100} <= set(shown)


# --- what cannot be compared ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([START, *(step_row(i, 2.0) for i in (1, 2, 3))], "step 4 is not in fsdp2"),
        ([START, *(step_row(i, 2.0) for i in (11, 12))], "no step in common"),
        ([START, *(step_row(i, 2.0) for i in (1, 2, 3)), step_row(4, float("nan"))], "step 4 has loss nan"),
        ([START, *(step_row(i, 2.0, float("inf")) for i in (1, 2, 3, 4))], "step 1 has grad_norm inf"),
        ([START, step_row(1, None)], "step 1 has no loss"),
        ([START, step_row(1, "2.5")], "is not a number"),
        ([START, step_row(1, 2.5, None)], "step 1 has no grad_norm"),
        ([START, {"step": 1, "eval_loss": 2.0}, END], "holds no training step with a loss"),
        ([START, {"step": 1, "grad_norm": 1.0}], "line 2: is neither event nor evaluation"),
        ([START, {"loss": 1.0, "grad_norm": 1.0}], "lacks a step number"),
        ([START, [1]], "line 2: is not a JSON object"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_log_that_cannot_be_compared_is_an_error(tmp_path, capsys, rows, told, swapped):
    good, bad = write_metrics(tmp_path / "good.jsonl"), write_rows(tmp_path / "bad.jsonl", rows)
    if swapped:
        assert compare(bad, good) == 2
        told = told.replace("fsdp2", "deepspeed")
    else:
        assert compare(good, bad) == 2
    assert told in error_line(capsys)


def test_two_runs_that_are_both_nan_do_not_pass(tmp_path, capsys):
    nan = write_metrics(tmp_path / "nan.jsonl", [float("nan")] * 4)
    assert compare(nan, nan) == 2
    assert "not finite" in error_line(capsys)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (json.dumps(START) + "\n" + '{"step": 1, "loss": 2.5, "gra', "line 2: is incomplete"),
        (json.dumps(START) + "\n" + '{"step": 1, "lo\n' + json.dumps(step_row(2, 2.0)) + "\n", "line 2: is not JSON"),
    ],
)
def test_an_empty_or_broken_file_is_an_error(tmp_path, capsys, content, told):
    (tmp_path / "bad.jsonl").write_text(content)
    assert compare(write_metrics(tmp_path / "good.jsonl"), tmp_path / "bad.jsonl") == 2
    assert told in error_line(capsys)


def test_a_missing_log_is_an_error(tmp_path, capsys):
    assert compare(write_metrics(tmp_path / "a.jsonl"), tmp_path / "none.jsonl") == 2
    assert "none.jsonl: no such file" in error_line(capsys)
    assert compare(tmp_path, tmp_path / "a.jsonl") == 2  # a folder without metrics.jsonl
    assert "holds no log that can be read (allowed: metrics.jsonl" in error_line(capsys)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--deepspeed_log", "a"],
        ["--logs", "a=x"],
        ["--logs", "a=x", "a=y"],
        ["--logs", "a=x", "y"],
        ["--logs", "a=x", "b=y", "--fsdp2_log", "z"],
        ["--logs", "a=x", "b=y", "--reference", "c"],
        ["--logs", "a=x", "b=y", "--dumps", "a=x", "c=y"],
        ["--logs", "a=x", "b=y", "--dumps", "b=y"],
        ["--logs", "a=x", "b=y", "--threshold", "-1"],
        ["--logs", "a=x", "b=y", "--threshold", "nan"],
        ["--logs", "a=x", "b=y", "--max_rows", "0"],
        ["--logs", "a=x", "b=y", "--jobs", "2"],
        ["--logs", "a=x", "b=y", "--", "--train_batch_size", "4"],
        ["--log", "a=x", "b=y"],
        ["--run", "quick"],
        ["--run", "quick", "--"],
        ["--run", "quick", "--plot", "x.png", "--", "--seed", "1"],
        ["--run", "quick", "--only", "zero9", "--", "--seed", "1"],
        ["--run", "quick", "--only", "(", "--", "--seed", "1"],
        ["--run", "nothing.yaml", "--", "--seed", "1"],
        ["--run", "quick", "--", "--output_dir", "x"],
        ["--run", "quick", "--", "--parity_dump=x"],
    ],
)
def test_wrong_arguments_are_told_in_one_line(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "x")
    write_metrics(tmp_path / "y")
    assert main(argv) == 2
    error_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]  # nothing was launched


# --- logs -------------------------------------------------------------------------------------------------------------


def test_where_a_step_stands_twice_the_later_row_counts(tmp_path):
    resumed = [START, step_row(1, 2.0), step_row(2, float("nan")), step_row(3, 9.0), {"event": "resume", "step": 1}]
    resumed += [
        step_row(2, 2.25),
        {"step": 2, "eval_loss": 7.0},
        {"step": 2, "eval_reward": 0.5},
        step_row(3, 2.5),
        END,
    ]
    run = read_run("a", write_rows(tmp_path / "a.jsonl", resumed))
    assert {step: row.loss for step, row in run.steps.items()} == {1: 2.0, 2: 2.25, 3: 2.5}
    assert run.param_dtype == "bf16"


def test_what_an_earlier_life_did_is_no_part_of_a_run(tmp_path):
    """A run that was killed after step 3, resumed at step 1 and left after step 2; then one that began anew."""
    rows = [START, *[step_row(step, 9.0) for step in (1, 2, 3)], {"event": "resume", "step": 1}, step_row(2, 2.5)]
    run = read_run("a", write_rows(tmp_path / "a.jsonl", rows))
    assert {step: row.loss for step, row in run.steps.items()} == {1: 9.0, 2: 2.5}
    run = read_run("b", write_rows(tmp_path / "b.jsonl", [*rows, START, step_row(1, 3.0)]))
    assert {step: row.loss for step, row in run.steps.items()} == {1: 3.0}


TEXT_LOG = (
    "W0101 some warning about step 7\n"
    "train:   0%|          | 0/20 [00:00<?, ?it/s]\r"
    "step 1/20 | epoch 0 | loss 2.345678901 | grad_norm 1.23456789 | lr 1.00e-05 | tokens 1234 | 0.52 s | 2345 tok/s\n"
    "train:   5%|▌         | 1/20 [00:00<00:10, 1.9it/s]\r\x1b[Ktrain: 1/20 [00:00<00:10]"
    "\x1b[32mstep 2/20\x1b[0m | epoch 0 | loss 2.5e-1 | grad_norm .5 | lr 1.00e-05 | tokens 9 | 0.5 s | 23 tok/s\r\n"
    "step 2/20 | eval_loss 9.0\n"
    "step 3/20 | epoch 0 | loss 3 | grad_norm 1E+2 | 9 tok/sstep 4/20 | epoch 0 | loss 1.5 | grad_norm 2.5 | x"
)


def test_text_logs_are_read_between_progress_bars(tmp_path):
    (tmp_path / "log.txt").write_text(TEXT_LOG)
    run = read_run("a", tmp_path / "log.txt")
    assert run.steps == {1: Step(2.345678901, 1.23456789), 2: Step(0.25, 0.5), 3: Step(3.0, 100.0), 4: Step(1.5, 2.5)}


def test_the_line_that_the_trainer_prints_is_read_back(tmp_path):
    from trainer.metrics import step_line

    row = {**step_row(3, 2.34567891, 0.123456789), "lr": 1e-5, "tokens": 7, "step_time": 0.5, "tokens_per_second": 14.0}
    (tmp_path / "log.txt").write_text(step_line(row, 20) + "\n")
    assert read_run("a", tmp_path / "log.txt").steps == {3: Step(2.34567891, 0.123456789)}


def test_a_text_log_compares_with_a_metrics_file(tmp_path, capsys):
    text = "".join(f"step {i}/4 | loss {loss} | grad_norm 1.0 |\n" for i, loss in enumerate(LOSSES, start=1))
    (tmp_path / "log.txt").write_text(text)
    metrics = write_metrics(tmp_path / "a.jsonl")
    assert compare(metrics, tmp_path / "log.txt") == 0
    assert "batch_hash: not in both logs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step 1/2 | loss nan | grad_norm 1.0 |\n", "step 1 has loss nan"),
        ("step 1/2 | loss 1.0 | grad_norm -inf |\n", "step 1 has grad_norm -inf"),
        ("step 1/2 | loss 1.0 |\n", "step 1 has no grad_norm"),
        ("step 1/2 | loss 1.0 | grad_norm 1.2", "step 1 has no grad_norm"),  # torn: it may have been 1.2345
        ("hello\n", "holds no training step with a loss"),
    ],
)
def test_text_logs_with_bad_values_are_errors(tmp_path, capsys, text, told):
    (tmp_path / "log.txt").write_text(text)
    assert compare(tmp_path / "log.txt", tmp_path / "log.txt") == 2
    assert told in error_line(capsys)


# --- bias -------------------------------------------------------------------------------------------------------------


def test_a_bias_below_the_threshold_is_told_and_does_not_fail(tmp_path, capsys):
    noise = [1e-3 * (1 if i % 2 else -1) for i in range(20)]
    a = write_metrics(tmp_path / "a.jsonl", [2.0] * 20)
    above = write_metrics(tmp_path / "above.jsonl", [2.0 * (1.02 + x) for x in noise])
    around = write_metrics(tmp_path / "around.jsonl", [2.0 * (1 + 20 * x) for x in noise])
    out = tmp_path / "out.json"
    assert compare(a, above, "--json", str(out)) == 0
    assert "bias: mean signed relative difference of the loss +2.000e-02, BIASED" in capsys.readouterr().out
    assert json.loads(out.read_text())["comparisons"][0]["biased"] is True
    assert compare(a, around, "--json", str(out)) == 0
    assert "not biased" in capsys.readouterr().out
    assert json.loads(out.read_text())["comparisons"][0]["biased"] is False


@pytest.mark.parametrize(
    ("rels", "biased"),
    [
        ([0.02] * 9, None),  # too few to say
        ([0.02] * 10, True),
        ([-0.02] * 10, True),
        ([0.004] * 10, False),  # under a tenth of the threshold
        ([0.02, -0.01] * 10, False),  # a mean of 0.005, of which 3 standard errors are 0.01
    ],
)
def test_bias_needs_ten_steps_three_standard_errors_and_a_tenth_of_the_threshold(rels, biased):
    mean, found = mean_and_bias(rels, threshold=0.045)
    assert found is biased and mean == pytest.approx(sum(rels) / len(rels))


# --- parity dumps -----------------------------------------------------------------------------------------------------


def compare_dumps(tmp_path, *more):
    log = write_metrics(tmp_path / "a.jsonl")
    return compare(log, log, "--dumps", f"deepspeed={tmp_path / 'a'}", f"fsdp2={tmp_path / 'b'}", *more)


def test_equal_dumps_pass(tmp_path):
    write_dump(tmp_path / "a"), write_dump(tmp_path / "b")
    assert compare_dumps(tmp_path, "--dump_threshold", "0") == 0


@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_a_perturbed_parameter_is_named(tmp_path, capsys, kind):
    write_dump(tmp_path / "a")
    write_dump(tmp_path / "b", **{kind + "s": changed("lm_head.weight", 1.25)})
    out = tmp_path / "out.json"
    assert compare_dumps(tmp_path, "--json", str(out)) == 1
    assert f"the {kind} of lm_head.weight differs by 0.25, over the threshold 0.0001" in capsys.readouterr().out
    assert json.loads(out.read_text())["comparisons"][0][f"worst_{kind}"] == {"name": "lm_head.weight", "rel": 0.25}
    assert compare_dumps(tmp_path, "--dump_threshold", "0.25") == 0


def test_a_gradient_that_is_zero_in_the_reference_alone_fails(tmp_path, capsys):
    write_dump(tmp_path / "a", gradients=changed("model.norm.weight", 0.0))
    write_dump(tmp_path / "b", gradients=changed("model.norm.weight", 1e-3))
    assert compare_dumps(tmp_path) == 1
    assert "the gradient of model.norm.weight differs by inf" in capsys.readouterr().out
    write_dump(tmp_path / "b", gradients=changed("model.norm.weight", 0.0))
    assert compare_dumps(tmp_path) == 0


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"model.norm.weight": torch.ones(4)}, "lacks lm_head.weight"),
        ({**changed("lm_head.weight", 1), "bias": torch.ones(1)}, "holds bias in addition"),
        (
            {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(3, 2)},
            "lm_head.weight has shape (3, 2) (allowed: (2, 3))",
        ),
        (changed("lm_head.weight", float("nan")), "lm_head.weight is not finite"),
        ({}, "lacks lm_head.weight, model.norm.weight"),
    ],
)
def test_dumps_of_other_tensors_are_errors(tmp_path, capsys, weights, told):
    write_dump(tmp_path / "a"), write_dump(tmp_path / "b", weights=weights)
    assert compare_dumps(tmp_path) == 2
    assert told in error_line(capsys)


def test_a_missing_broken_or_empty_dump_is_an_error(tmp_path, capsys):
    write_dump(tmp_path / "a"), write_dump(tmp_path / "b")
    (tmp_path / "b" / "grads_step1.safetensors").write_bytes(b"torn")
    assert compare_dumps(tmp_path) == 2
    assert "cannot be read as safetensors" in error_line(capsys)
    (tmp_path / "b" / "grads_step1.safetensors").unlink()
    assert compare_dumps(tmp_path) == 2
    assert "grads_step1.safetensors: no such file" in error_line(capsys)
    write_dump(tmp_path / "a", gradients={}), write_dump(tmp_path / "b", gradients={})
    assert compare_dumps(tmp_path) == 2
    assert "holds no tensor" in error_line(capsys)

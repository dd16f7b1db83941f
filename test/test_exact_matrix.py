"""`compare_backends.py --exact MODEL` and `--resumes N`: the verdicts, the report and the exit code."""

import json
from pathlib import Path

import pytest
from launch import forked

import compare_backends
from trainer.compare.runs import exact_matrix
from trainer.compare.runs.comparison_report import MARKERS
from trainer.compare.runs.launch import Outcome

RUNS = ["-m", "trainer.compare.runs.many_runs"]
NORM = "model.norm.weight"
LAYOUTS = ["deepspeed-z1-1r-mb1", "deepspeed-z1-2r-mb1", "fsdp2-1r-mb1", "fsdp2-2r-mb1"]


@pytest.fixture
def compare(shared_data, tmp_path, monkeypatch, capsys):
    """A function of flags for the command: (exit code, what it printed). Its ranks are forked, which saves imports."""

    def launched(jobs, cwd, num_parallel, timeout):
        for job in jobs:
            command = job.command()
            lines, ranks = command[-1], int(command[command.index("--nproc_per_node") + 1])
            script = ["test/planted_ulp.py", lines, NORM] if fault == ["ulp"] and ranks == 2 else [*RUNS, lines]
            if fault == ["rate"] and Path(lines).parent.name == "second":
                Path(lines).write_text(Path(lines).read_text().replace('"1e-3"', '"1.1e-3"'))
            code, output = forked(ranks, *script, timeout=timeout, cwd=cwd)
            job.log.write_text(output)
            yield job, Outcome(0.0, None if code == 0 else output[-3000:])

    fault: list[str] = []
    monkeypatch.setattr(exact_matrix, "run_jobs", launched)
    flags = ["--dataset", f"{shared_data}/gsm8k/train.jsonl", "--input_key", "question", "--output_key", "answer"]
    flags += ["--max_samples", "20", "--train_batch_size", "4", "--max_steps", "4", "--max_len", "128"]
    flags += ["--param_dtype", "fp32", "--learning_rate", "1e-3", "--no_save"]

    def run(name: str, *own: str, layouts: list[str] = LAYOUTS, plant: str | None = None) -> tuple[int, str]:
        fault[:] = [plant]
        model, only = f"{shared_data}/models/stories260K-hf", f"^({'|'.join(layouts)})$"
        places = ["--output_dir", str(tmp_path / name), "--only", only]
        code = compare_backends.main(["--exact", model, *own, *places, "--", *flags])
        return code, capsys.readouterr().out

    return run


def test_layouts_are_judged_by_their_bits(compare, tmp_path):
    table = tmp_path / "page.md"
    table.write_text("\n".join(["above", *MARKERS, "below\n"]))
    code, printed = compare("equal", "--update_table", str(table))
    assert code == 0 and [line.split()[2].rstrip(":") for line in printed.splitlines()[:-1]] == sorted(
        LAYOUTS, key=by_ranks
    )
    report = json.loads((tmp_path / "equal/report.json").read_text())
    bits = {shown for cells in report["bits"].values() for shown in cells.values()}
    assert report["passed"] and [*report["bits"]] == LAYOUTS and len(bits) == 1
    assert "4 layouts, 1 set of bits" in table.read_text() and table.read_text().endswith("below\n")

    code, printed = compare("planted", plant="ulp")
    assert code == 1 and printed.count("PASS stories260K-hf") == 3
    [failed] = [line for line in printed.splitlines() if line.startswith("FAIL stories260K-hf")]
    where = f"grads_step1.safetensors: {NORM} differs in 1 of 64 elements, first at (5,)"
    assert failed.startswith(
        f"FAIL stories260K-hf {LAYOUTS[1]}: {where}"
    )  # the first run of the two ranks has the fault
    report = json.loads((tmp_path / "planted/report.json").read_text())
    assert not report["passed"] and [*report["bits"][LAYOUTS[1]].values()] == [f"**FAIL** {failed.split(': ', 1)[1]}"]


def by_ranks(name: str) -> tuple[int, str]:
    return int(name.split("-")[-2][0]), LAYOUTS.index(name)


def test_runs_are_resumed_on_other_layouts(compare, tmp_path):
    code, printed = compare("resumed", "--resumes", "2")
    lines = printed.splitlines()
    assert code == 0 and lines[-2] == "2 of 2 resumed runs have the bits of the undisturbed one"
    assert all(line.startswith(f"PASS {LAYOUTS[0]} -> step ") and line.count(" -> step ") == 2 for line in lines[:2])
    assert not (tmp_path / "resumed/first").exists() and (tmp_path / "resumed/undisturbed").exists()
    code, printed = compare("parted", "--resumes", "1", layouts=LAYOUTS[2:], plant="rate")
    assert (
        code == 1
        and "0 of 1 resumed run has the bits" in printed
        and "FAIL" in printed
        and "differ first at step" in printed
    )

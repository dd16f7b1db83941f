"""Run the plain loop and every configuration of a matrix, compare them, and write the report."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from trainer.compare.runs.comparison_report import (
    MEASURED,
    check_markers,
    configuration_line,
    matrix_markdown,
    measured,
    write_between_markers,
    write_json,
    write_text,
)
from trainer.compare.runs.dumps import add_dumps
from trainer.compare.runs.launch import (
    Job,
    Outcome,
    configuration_job,
    error_of_run,
    reference_job,
    run_jobs,
    shared_job,
)
from trainer.compare.runs.logs import Run, read_run
from trainer.compare.runs.matrix import REFERENCE, Configuration, given_param_dtype
from trainer.compare.runs.parity import Thresholds, compare_runs
from trainer.compare.runs.plots import plot_matrix, require_matplotlib
from trainer.errors import UserError
from trainer.metrics import counted


def run_matrix(
    configurations: list[Configuration],
    train_args: list[str],
    thresholds_for: Callable[[str], Thresholds],
    *,
    cwd: Path,
    output_dir: Path,
    num_parallel: int,
    timeout: float,
    update_table: str | None = None,
    share_launch: bool = False,
) -> bool:
    """Run a matrix, write report.json, .md and .png, and return whether every configuration passed.

    `thresholds_for` takes a --param_dtype. `update_table` is a file with the two markers of `comparison_report.MARKERS`;
    the table is also written between them. With `share_launch`, configurations with the same number of ranks run in one launch.
    That takes less time, but separates the runs less.
    Raises: UserError if the plain loop fails, because there is then nothing to compare with.
    """
    require_matplotlib("--run")
    if update_table:
        check_markers(update_table)
    _make_output_dir(output_dir)

    def run_all(jobs: list[Job]):
        return closing(run_jobs(jobs, cwd, num_parallel, timeout))

    with run_all([reference_job(train_args, output_dir)]) as finished:
        reference, seconds = _read_reference(*next(finished), output_dir)
    print(f"reference: {counted(len(reference.steps), 'step')} ({seconds:.0f} s)", flush=True)

    entries, runs = {}, []
    jobs = _jobs(configurations, train_args, output_dir, share_launch)
    with run_all([job for job, _ in jobs]) as finished:
        sharing = {job.name: group for job, group in jobs}
        for job, outcome in finished:
            for number, configuration in enumerate(sharing[job.name]):
                dtype = given_param_dtype([*train_args, *configuration.args])
                own = _own_outcome(job, number, outcome, output_dir / configuration.name)
                entry, run = assess(configuration, own, reference, output_dir, dtype, thresholds_for)
                entries[configuration.name] = entry
                runs += [run] if run else []
                print(f"[{len(entries)}/{len(configurations)}] {configuration_line(entry)}", flush=True)

    entries = [entries[configuration.name] for configuration in configurations]
    report = {
        "reference": {"name": REFERENCE, "steps": len(reference.steps), "seconds": seconds},
        "train_args": train_args,
        "thresholds": {dtype: asdict(thresholds_for(dtype)) for dtype in sorted({e["param_dtype"] for e in entries})},
        "configurations": entries,
        "passed": all(entry["passed"] for entry in entries),
    }
    write_json(output_dir / "report.json", report)
    write_text(output_dir / "report.md", matrix_markdown(report))
    if update_table:
        write_between_markers(update_table, matrix_markdown(report))
    plot_matrix(output_dir / "report.png", reference, runs, report)
    return report["passed"]


def _jobs(configurations, train_args, output_dir, share_launch: bool) -> list[tuple[Job, list[Configuration]]]:
    """The jobs to launch, each with the configurations that it runs."""
    if not share_launch:
        return [(configuration_job(c, train_args, output_dir), [c]) for c in configurations]
    groups = [[c for c in configurations if c.nproc == nproc] for nproc in sorted({c.nproc for c in configurations})]
    return [(shared_job(group, train_args, output_dir), group) for group in groups]


def _own_outcome(job: Job, number: int, outcome: Outcome, run_folder: Path) -> Outcome:
    """The outcome of configuration `number` of a job. A shared launch may fail after some of its runs have passed."""
    if job.num_sharing == 1:
        return outcome
    metrics, seconds = run_folder / "metrics.jsonl", outcome.seconds / job.num_sharing
    if metrics.exists() and '"event": "end"' in metrics.read_text().splitlines()[-1]:
        return Outcome(seconds, None)
    own = error_of_run(job.log, number)
    return Outcome(seconds, own or f"not run: an earlier configuration ended their launch ({outcome.error})")


def assess(
    configuration: Configuration,
    outcome: Outcome,
    reference: Run,
    output_dir: Path,
    dtype: str | None,
    thresholds_for: Callable[[str], Thresholds],
) -> tuple[dict, Run | None]:
    """Return the entry of one finished configuration in report.json, and its loss curve if it has one.

    `dtype` is the --param_dtype in its arguments. If it is None, the dtype comes from its metrics.jsonl.
    """
    entry = {"name": configuration.name, "nproc": configuration.nproc, "args": list(configuration.args)}
    entry |= {"param_dtype": dtype or "fp32", **dict.fromkeys(MEASURED), "seconds": outcome.seconds}
    if outcome.error:
        return entry | {"passed": False, "error": outcome.error}, None
    run, comparison, failures = None, None, []
    try:
        run = read_run(configuration.name, output_dir / configuration.name)
        entry["param_dtype"] = dtype or run.param_dtype or "fp32"
        comparison = compare_runs(reference, run, thresholds_for(entry["param_dtype"]))
        add_dumps(comparison, output_dir / REFERENCE / "parity", output_dir / configuration.name / "parity")
    except UserError as error:
        failures.append(str(error))
    if comparison:
        entry |= measured(comparison)
        failures = comparison.failures + failures
    return entry | {"passed": not failures, "error": "; ".join(failures) or None}, run


def _make_output_dir(output_dir: Path) -> None:
    """Make the folder, which must be empty: results of an earlier matrix must not mix with new ones."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        if any(output_dir.iterdir()):
            raise UserError("--output_dir", f"{output_dir} is not empty", "a new or empty folder")
    except OSError as error:
        raise UserError("--output_dir", f"{output_dir} cannot be used: {error.strerror}") from None


def _read_reference(job: Job, outcome: Outcome, output_dir: Path) -> tuple[Run, float]:
    if outcome.error:
        raise UserError("the plain loop", f"{outcome.error} (log: {job.log})")
    return read_run(REFERENCE, output_dir / REFERENCE), outcome.seconds

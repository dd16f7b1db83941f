"""`compare_backends.py --locate A B`: run one step of two configurations, or read two runs, and find the difference."""

import dataclasses
import math
from pathlib import Path

from safetensors import SafetensorError

from trainer.compare.locate.locate import as_dict, locate
from trainer.compare.locate.locate_samples import locate_samples, samples_file
from trainer.compare.locate.traced_pair import PhaseResult, TracedRun
from trainer.compare.runs.comparison_report import write_json
from trainer.compare.runs.launch import configuration_job, run_jobs
from trainer.compare.runs.matrix import Configuration, load_matrix
from trainer.errors import UserError
from trainer.metrics import counted

PHASES = ("data", "forward", "loss", "backward", "gradients", "gradient norm", "optimizer state", "weights")
ONE_STEP = ("--max_steps", "1", "--lr_warmup_ratio", "0")  # the only step has the whole rate


def is_folder_pair(names: list[str]) -> bool:
    return all(Path(name).is_dir() for name in names)


def configurations_of(names: list[str], matrix: str | None) -> list[Configuration]:
    """The two configurations of a matrix (default: full). Raises UserError for an unknown name."""
    known = {configuration.name: configuration for configuration in load_matrix(matrix or "full")}
    for name in names:
        if name not in known:
            raise UserError("--locate", repr(name), f"two run folders, or names such as {', '.join(list(known)[:4])}")
    if names[0] == names[1]:
        raise UserError("--locate", f"{names[0]} twice", "two different configurations")
    return [known[name] for name in names]


def run_pair(
    configurations: list[Configuration], train_args: list[str], *, cwd: Path, output_dir: Path, timeout: float
) -> list[Path]:
    """Run one traced step of each, one after the other. Returns their folders. Raises UserError if one fails."""
    output_dir.mkdir(parents=True, exist_ok=True)
    folders = []
    for configuration in configurations:
        folder = output_dir / configuration.name
        extra = (*ONE_STEP, "--save_steps", "1", "--overwrite", "--no_save", "--parity_trace", str(folder / "parity"))
        job = configuration_job(
            dataclasses.replace(configuration, args=(*configuration.args, *extra)), train_args, output_dir
        )
        for _, outcome in run_jobs([job], cwd, 1, timeout):
            if outcome.error:
                raise UserError(configuration.name, f"{outcome.error} (log: {job.log})")
        print(f"{configuration.name}: one step ({outcome.seconds:.0f} s)", flush=True)
        folders.append(folder)
    return folders


def locate_folders(folders: list[str | Path], json_path: str | None) -> bool:
    """Compare two traced runs, print the report, and return whether they agree."""
    names = [Path(folder).name for folder in folders]
    names = names if names[0] != names[1] else [str(folder) for folder in folders]
    if any(map(samples_file, folders)):
        agree, text, facts = locate_samples(names, folders)
        print(text)
        if json_path:
            write_json(json_path, facts)
        return agree
    a, b = (TracedRun(name, folder) for name, folder in zip(names, folders))
    try:
        results = locate(a, b)
    except SafetensorError as error:
        raise UserError("--locate", f"a file of {names[0]} or {names[1]} is cut off or edited: {error}") from None
    print(report(a, b, results))
    agree = all(result.finding is None for result in results)
    if json_path:
        write_json(json_path, {"a": names[0], "b": names[1], "agree": agree, "phases": as_dict(results)})
    return agree


def report(a: TracedRun, b: TracedRun, results: list[PhaseResult]) -> str:
    """The phases as a table, then the first place where the runs differ."""
    lines = [f"a = {_layout(a)}", f"b = {_layout(b)}", *_other_versions(a, b), ""]
    lines.append(f"{'phase':<14} {'places':>6} {'difference / allowed':>21}  first difference")
    for result in results:
        finding = result.finding
        where = f"{finding.where}: {_number(finding.rel)}, allowed {_number(finding.allowed)}" if finding else "-"
        lines.append(f"{result.phase:<14} {result.num_places:>6} {_number(result.worst):>21}  {where}")
    first = next((result.finding for result in results if result.finding), None)
    missing = [phase for phase in PHASES if phase not in {result.phase for result in results}]
    if missing:
        lines += ["", f"not compared, since files are missing: {', '.join(missing)}"]
    if not first:
        return "\n".join([*lines, "", "The runs agree up to rounding."])
    lines += ["", f"The runs first differ in {first.phase}, at {first.where}."]
    facts = [("agrees before", first.before), ("tokens", first.tokens), ("features", first.features)]
    facts.append(("ratio b / a", "" if first.ratio is None else f"{first.ratio:.6g}"))
    facts.append(("then also", ", ".join(first.others[:6]) + (", ..." if len(first.others) > 6 else "")))
    facts.append(("guess", first.words))
    return "\n".join([*lines, *(f"  {name + ':':<15} {value}" for name, value in facts if value)])


def _other_versions(a: TracedRun, b: TracedRun) -> list[str]:
    """Packages whose versions differ between the runs."""
    names = dict.fromkeys([*a.versions, *b.versions])
    pairs = [(name, a.versions.get(name), b.versions.get(name)) for name in names if a.versions and b.versions]
    return [f"other {name}: {old} in {a.name}, {new} in {b.name}" for name, old, new in pairs if old != new]


def _layout(run: TracedRun) -> str:
    sizes = ", ".join(f"{axis} {size}" for axis, size in run.facts["sizes"].items())
    return f"{run.name} ({run.facts['dtype']}, {sizes}, {counted(len(run.keys), 'token')})"


def _number(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.3g}"

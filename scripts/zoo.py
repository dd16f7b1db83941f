"""What can the trainer do with each decoder architecture of transformers? Run a tiny model of each, keep the results.

  python -m scripts.zoo                              every model in every configuration; writes docs/models.json
  python -m scripts.zoo --models qwen3 mamba2        only these models; the other rows stay
  python -m scripts.zoo --configurations ring2 lora  only these cells; the other cells stay

trainer/compare/zoo/zoo.py says what a cell is. scripts/docs/zoo_page.py writes docs/models.md from the results.
Exit code: 0 if no cell is wrong or crashes, 1 if one does, 2 if nothing could be run.
"""

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from scripts.zoo_models import SKIPPED, tiny_config, zoo_names
from trainer.compare.machines.forked_ranks import import_libraries
from trainer.compare.zoo.zoo import CONFIGURATIONS, is_bad, run_model, write_demo
from trainer.errors import UserError
from trainer.flags.names.word_parser import OneLineParser

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        import_libraries()
        more = read_configs(options.configs)
        models = _chosen("--models", options.models, [*zoo_names(), *more])
        names = _chosen("--configurations", options.configurations, [c.name for c in CONFIGURATIONS])
        configs = {name: more[name][1]() for name in models if name in more}
        with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
            work_dir = Path(options.work_dir or temporary).resolve()
            versions = {
                name: version(name).partition("+")[0] for name in ("transformers", "torch", "deepspeed", "peft")
            }
            results = read_results(options.output) | {"versions": versions}
            rows = run_zoo(models, names, work_dir, options.timeout, options.jobs, configs)
            for name, row in rows:
                about = {"about": more[name][0]} if name in more else {}
                kept = results["models"].get(name, {}).get("cells", {})
                results["models"][name] = {**row, **about, "cells": {**kept, **row["cells"]}}
                write_results(options.output, results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = [cell for name in models for cell in results["models"][name]["cells"].values() if is_bad(cell)]
    print(f"{len(bad)} cells are wrong or crash; {options.output} is written")
    return 1 if bad else 0


def build_parser() -> OneLineParser:
    parser = OneLineParser("python -m scripts.zoo", description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="model_type or name of a row (default: all)")
    parser.add_argument("--configurations", nargs="+", metavar="NAME", help="cells to run (default: all)")
    parser.add_argument("--output", default=str(ROOT / "docs/models.json"), metavar="JSON", help="the results")
    more = str(ROOT / "test/unusual_configs.py")
    parser.add_argument("--configs", default=more, metavar="FILE", help="Python file with CONFIGS: more models")
    parser.add_argument("--work_dir", metavar="DIR", help="keep the models, logs and runs here (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="time limit of a cell")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models that run at a time (default: 1)")
    return parser


def _chosen(flag: str, wanted: list[str] | None, known: list[str]) -> list[str]:
    for name in wanted or ():
        if name in SKIPPED and flag == "--models":
            raise UserError(flag, f"{name} is not in the zoo: {SKIPPED[name]}")
        if name not in known:
            raise UserError(flag, name, ", ".join(known))
    return [name for name in known if name in wanted] if wanted else known


def read_configs(path: str) -> dict[str, tuple]:
    """{name: (what is unusual, function that makes the config)}: CONFIGS of a Python file."""
    if not os.path.isfile(path):
        raise UserError("--configs", f"no such file: {path}")
    return runpy.run_path(path)["CONFIGS"]


def read_results(path: str | Path) -> dict:
    """The results of earlier runs: {"versions", "models": {name: row}}. Empty if there are none."""
    if not os.path.isfile(path):
        return {"versions": {}, "models": {}}
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise UserError("--output", f"{path} is not JSON: {error}", "a file that the zoo wrote") from None


def write_results(path: str, results: dict) -> None:
    try:
        Path(path).write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise UserError("--output", f"{path} cannot be written: {error.strerror}") from None


def run_zoo(
    models: list[str], names: list[str], work_dir: Path, timeout: float, jobs: int, configs: dict | None = None
):
    """Yield (model, row) for each model when its cells have run. Call `import_libraries` first.

    `configs` are configs by name that replace an architecture's tiny one.
    """
    write_demo(work_dir, timeout)
    # a worker imports the code of its models once, for all of its forks
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as workers:
        tasks = {
            workers.submit(_run_row, name, names, work_dir, timeout, (configs or {}).get(name)): name for name in models
        }
        for number, task in enumerate(as_completed(tasks), start=1):
            name, row = tasks[task], task.result()
            print(f"[{number}/{len(models)}] {row_line(name, row)}", flush=True)
            yield name, row


def _run_row(name: str, names: list[str], work_dir: Path, timeout: float, config) -> dict:
    return run_model(name, names, work_dir, timeout, config or tiny_config(name))


def row_line(name: str, row: dict) -> str:
    if row["problem"]:
        return f"{name}: {row['problem']}"
    verdicts = [
        f"{key} {cell['verdict']}" + (f" ({cell['note']})" if is_bad(cell) else "")
        for key, cell in row["cells"].items()
        if cell["verdict"] != "pass"
    ]
    passed = sum(cell["verdict"] == "pass" for cell in row["cells"].values())
    return f"{name} ({row['seconds']:.0f} s): {passed} pass" + "".join(f", {verdict}" for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())

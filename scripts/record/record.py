"""Run other trainers under the conditions of cases.py and methods.py and judge them: `python scripts/record/record.py [TRAINER ...]`.

Each trainer has an environment, made by environments.sh. The results go to docs/record.json, the page to docs/record.md.
"""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cases
import methods
from judge import judge

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
    "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
RECORD = ROOT / "docs/record.json"
# name on the page: (environment, script, its first argument, package whose version is shown)
OURS = {f"this trainer, {backend}": ("", "run_ours.py", backend, "") for backend in ("fsdp2", "deepspeed")}
TRAINERS = {
    **OURS,
    "HF Trainer": ("trl", "run_hf.py", "hf", "transformers"),
    "TRL SFTTrainer": ("trl", "run_hf.py", "trl", "trl"),
    "LLaMA-Factory": ("llamafactory", "run_llamafactory.py", "", "llamafactory"),
    "ms-swift": ("swift", "run_swift.py", "", "ms-swift"),
    "axolotl": ("axolotl", "run_axolotl.py", "", "axolotl"),
    "Oumi": ("oumi", "run_oumi.py", "", "oumi"),
}
METHOD_TRAINERS = {**OURS, "TRL": ("trl", "run_trl.py", "", "trl")}
PAIR_TRAINERS = {name: TRAINERS[name] for name in ("LLaMA-Factory", "ms-swift", "axolotl")}  # DPO and reward models
CONDITIONS = cases.CONDITIONS | methods.METHODS
NOT_OFFERED = {("HF Trainer", "chat template with masks"): "it takes tokenized rows and has no chat templates"}
for name, method, reason in (
    ("LLaMA-Factory", "grpo", "it has no GRPO"),
    ("Oumi", "rm", "it has no trainer of reward models"),
):
    NOT_OFFERED |= {
        (name, title): reason for title, condition in methods.METHODS.items() if condition["method"] == method
    }


def trainers_of(condition_name: str) -> dict:
    if condition_name in cases.CONDITIONS:
        return TRAINERS
    condition = methods.METHODS[condition_name]
    of_pairs = {} if condition["method"] == "grpo" else PAIR_TRAINERS
    named = {name: TRAINERS[name] for name, condition in NOT_OFFERED if condition == condition_name}
    return METHOD_TRAINERS | of_pairs | named | ({"Oumi": TRAINERS["Oumi"]} if condition["method"] == "dpo" else {})


def python_of(environments: Path, name: str) -> str:
    return str(environments / name / "bin/python") if name else sys.executable


def launch(command: list[str], ranks: int, output: Path, python: str, timeout: int) -> int:
    """The exit code; without torchrun for `ranks` 0. Raises SystemExit if the run does not end, which says nothing of its trainer."""
    several = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with open(f"{output}.log", "w") as log:
        process = subprocess.Popen(
            [*(several if ranks else [python]), *command],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # torchrun ends its ranks, which have groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"{output.name}: not ended after {timeout} s; nothing is recorded") from None


def run(name: str, condition_name: str, environments: Path, folder: Path, timeout: int, judge_only: bool) -> dict:
    """One cell: {"verdict", worst differences, "note"}. With `judge_only` the runs are there already."""
    if (name, condition_name) in NOT_OFFERED:
        return {"verdict": "none", "note": NOT_OFFERED[name, condition_name]}
    environment, script, kind, _ = trainers_of(condition_name)[name]
    condition = {**CONDITIONS[condition_name], "epochs": cases.EPOCHS}
    condition |= {"learning_rate": cases.LEARNING_RATE, "max_length": cases.MAX_LENGTH}
    output = folder / f"{name}-{condition_name}".replace(" ", "_").replace(",", "")
    parts = [(output, condition)]
    if condition.get("resume"):  # the same run again, from its checkpoint in the middle
        parts.append((Path(f"{output}-resumed"), {**condition, "resume_from": str(output / "checkpoint-2")}))
    for output, part in parts if not judge_only else ():
        for old in (output, Path(f"{output}-tokens"), Path(f"{output}-prepared")):
            shutil.rmtree(old, ignore_errors=True)
        output.mkdir()
        command = [str(HERE / script), *([kind] if kind else []), str(folder / "inputs"), str(output), json.dumps(part)]
        if launch(command, part.get("ranks", 0), output, python_of(environments, environment), timeout):
            lines = Path(f"{output}.log").read_text().strip().splitlines() or ["no output"]
            return {"verdict": "refused", "note": next((line for line in lines if "Error: " in line), lines[-1])[:300]}
    return judge(folder / "inputs", parts[-1][0], condition)


def version(python: str, package: str) -> str:
    if not package:
        return subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
    code = f"import importlib.metadata as m; print(m.version('{package}'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def with_runs(cell: dict, before: dict) -> dict:
    """The cell with "runs": how often this version had this verdict and note, this time included. What is not offered has no runs."""
    if cell["verdict"] == "none":
        return cell
    again = all(cell[key] == before.get(key) for key in ("verdict", "note", "version"))
    return {**cell, "runs": before.get("runs", 1) + 1 if again else 1}


def read_record() -> dict:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "trainers",
        nargs="*",
        default=list(TRAINERS | METHOD_TRAINERS),
        help=f"of {', '.join(TRAINERS | METHOD_TRAINERS)}",
    )
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS))
    parser.add_argument("--environments", type=Path, default=ROOT / "runs/record/environments")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/record")
    parser.add_argument("--timeout", type=int, default=300, help="seconds of one run")
    parser.add_argument("--judge_only", action="store_true", help="judge the runs of the folder again")
    args = parser.parse_args()
    if not (args.folder / "inputs").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        cases.make(args.folder / "inputs")
        methods.make(args.folder / "inputs")
    for name in args.trainers:
        for condition in args.conditions:
            if name not in trainers_of(condition):
                continue
            environment, _, _, package = trainers_of(condition)[name]
            before = read_record().get(name, {}).get(condition, {})
            if args.judge_only and before.get("verdict", "refused") in ("refused", "none"):
                continue
            cell = run(name, condition, args.environments, args.folder, args.timeout, args.judge_only)
            made = {
                "version": version(python_of(args.environments, environment), package),
                "date": str(datetime.date.today()),
            }
            if args.judge_only:
                cell |= {key: before[key] for key in (*made, "runs") if key in before}
            else:
                cell = with_runs(cell | made, before)
            record = read_record()  # another process may have written its cells
            record.setdefault(name, {})[condition] = cell
            print(f"{name} | {condition}: {json.dumps(cell)}", flush=True)
            RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

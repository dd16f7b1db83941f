"""How tests start real processes: with a time-out, without leftovers, with the output at hand when something fails."""

import atexit
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from trainer.distributed.processor import fixed_kernels

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
APART = ROOT / ".venv/apart"  # where scripts/setup_env.sh installs torchao and bitsandbytes
FULL = os.environ.get("PARITY") == "full"  # every cell of a matrix, where CI runs one of each kind on each backend
SHORT_ROLLOUTS = ["--prompt_max_len", "64", "--generate_max_len", "8", "--rollout_batch_size", "4"]


def _environment(**env: str) -> dict[str, str]:
    """MKL_CBWR is what --exact asks for. It must be there before the first product of a process that has several runs."""
    fixed = {"OMP_NUM_THREADS": "1", "MKL_CBWR": fixed_kernels(), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, **env}


@functools.cache
def installed(ends: bool = True) -> dict[str, str]:
    """Variables for a torchrun that finds the trainer as setup.py installs it; without `ends`, as a mere folder."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    if not ends:
        (Path(folder) / "trainer.egg-info/entry_points.txt").unlink()
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run_process(command: list[str], *, timeout: float = 300, cwd: Path = ROOT, **env: str) -> tuple[int, str]:
    """(exit code, stdout and stderr together) of a command; all it started is killed when it is over or too slow."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=_environment(**env),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks, which are in other sessions
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"{command} took longer than {timeout} s:\n{output[-4000:]}") from None
    return process.returncode, output


def run_until_gone(command: list[str], *, timeout: float, cwd: Path = ROOT, **env: str) -> tuple[int, str, float]:
    """(exit code, output, seconds from the first line that tells an error until every process is gone).

    Measured from that line on, so that a busy machine's start-up does not count.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=cwd, env=_environment(**env), start_new_session=True, **streams)
    killer = threading.Timer(timeout, lambda: os.killpg(process.pid, signal.SIGTERM))
    killer.start()
    lines, told = [], None
    for line in process.stdout:
        lines.append(line)
        if told is None and line.startswith("error: "):
            told = time.monotonic()
    code = process.wait()
    killer.cancel()
    assert told is not None, "".join(lines)[-3000:]
    return code, "".join(lines), time.monotonic() - told


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def torchrun(num_ranks: int, *arguments: str, timeout: float = 300, cwd: Path = ROOT, **env: str) -> tuple[int, str]:
    """Run a module (`-m name ...`) or script on `num_ranks` local ranks."""
    return run_process([*LAUNCHER, str(num_ranks), *arguments], timeout=timeout, cwd=cwd, **env)


_server: list[subprocess.Popen] = []  # of this process


def forked(num_ranks: int, *arguments: str, timeout: float = 300, cache: str = "", cwd: Path = ROOT) -> tuple[int, str]:
    """As `torchrun`, with ranks forked from a process that has imported the libraries already; see rank_server.py.

    Of the environment the ranks get HF_DATASETS_CACHE, as it is now, or `cache` in its place.
    """
    if not _server:
        command = [sys.executable, str(ROOT / "test/rank_server.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _server.append(subprocess.Popen(command, env=_environment(), cwd=ROOT, **pipes))
        atexit.register(_server[0].kill)
    log = Path(tempfile.mkdtemp()) / "log"
    asked = {"arguments": arguments, "num_ranks": num_ranks, "log": str(log), "timeout": timeout}
    asked["cwd"] = str(cwd)
    asked["cache"] = cache or os.environ.get("HF_DATASETS_CACHE")
    _server[0].stdin.write(json.dumps(asked) + "\n")
    _server[0].stdin.flush()
    ending = json.loads(_server[0].stdout.readline())
    if ending["kind"] == "done":
        return 0, log.read_text()
    return 1, f"{log.read_text()}\n{ending['kind']}: {ending['text']}"


def in_fork(*arguments: str, **options) -> tuple[int, str]:
    """As `forked` with one rank, with the exit code of the command, and without the traceback that tells the code."""
    code, output = forked(1, *arguments, **options)
    said, _, last = output.rpartition("Traceback (most recent call last):")
    left = re.search(r"RuntimeError: exit code (\d+)$", last)
    return (int(left[1]), said) if code and left else (code, output)


def train_many(num_ranks: int, command_lines: list[list[str]], folder: Path, timeout: float, launch=forked) -> str:
    """Run several train_sft command lines in one set of ranks, started by `forked` or `torchrun`; returns the output."""
    runs = folder / f"runs-{uuid.uuid4()}.json"
    runs.write_text(json.dumps(command_lines))
    code, output = launch(num_ranks, "-m", "trainer.compare.runs.many_runs", str(runs), timeout=timeout)
    assert code == 0, output[-6000:]
    return output


def train_many_with_trl(runs: list[dict], folder: Path) -> None:
    """Run TRL's trainers one after the other in one process; see test/trl_runs.py."""
    (folder / "runs.json").write_text(json.dumps(runs))
    script, packages = str(ROOT / "test/trl_runs.py"), os.pathsep.join(filter(None, sys.path))
    code, output = run_process([sys.executable, script, str(folder / "runs.json")], timeout=900, PYTHONPATH=packages)
    assert code == 0, output[-6000:]


def read_steps(run_folder: Path) -> list[dict]:
    """The step rows of a run's metrics.jsonl; those beyond where a later start or resume took over do not count."""
    rows = {}
    for row in read_rows(run_folder):
        if row.get("event") in ("start", "resume"):
            rows = {step: kept for step, kept in rows.items() if step <= row.get("step", 0)}
        if "loss" in row:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def read_rows(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]

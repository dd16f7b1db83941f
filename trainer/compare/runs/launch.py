"""Run commands in parallel, each with a log and a time limit, and leave no process behind."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.runs.many_runs import RUN_BEGINS
from trainer.compare.runs.matrix import REFERENCE, Configuration

GRACE_SECONDS = 5.0
RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
ERROR_LINE = re.compile(r"^(\S+: )?error: ")
EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")
# torchrun writes this about its children, and a rank about another rank that failed first
SECOND_HAND = re.compile(r"ChildFailedError|Connection (closed|reset) by|Broken pipe")
EXIT_CODE = re.compile(r"failed \(exitcode: (-?\d+)\)")


@dataclass(frozen=True)
class Outcome:
    seconds: float
    error: str | None  # None: the command ended with exit code 0


@dataclass(frozen=True)
class Job:
    """A command to launch. `command` is called when the job starts, so that its port is free at that time."""

    name: str
    command: Callable[[], list[str]]
    log: Path
    environment: dict[str, str]
    num_sharing: int = 1  # number of configurations in it; each adds its own time limit


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen
    started: float


def reference_job(train_args: list[str], output_dir: Path) -> Job:
    """The job of the plain single-process loop, which is always in fp32."""
    folder = output_dir / REFERENCE
    command = [sys.executable, "test/reference.py", *train_args, "--param_dtype", "fp32", *_outputs(folder)]
    return Job(REFERENCE, lambda: command, output_dir / f"{REFERENCE}.log", dict(os.environ))


def configuration_job(configuration: Configuration, train_args: list[str], output_dir: Path) -> Job:
    environment = dict(os.environ)
    if configuration.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")

    def command() -> list[str]:
        return training_command(configuration, train_args, output_dir, free_port())

    return Job(configuration.name, command, output_dir / f"{configuration.name}.log", environment)


def shared_job(configurations: list[Configuration], train_args: list[str], output_dir: Path) -> Job:
    """One launch of all `configurations`, one after the other. They have the same number of ranks."""
    nproc = configurations[0].nproc
    name = f"{nproc}-ranks"
    lines = output_dir / f"{name}.json"
    lines.write_text(json.dumps([_flags(configuration, train_args, output_dir) for configuration in configurations]))

    def command() -> list[str]:
        return [*_torchrun(nproc, free_port()), "-m", "trainer.compare.runs.many_runs", str(lines)]

    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    return Job(name, command, output_dir / f"{name}.log", environment, num_sharing=len(configurations))


def training_command(configuration: Configuration, train_args: list[str], output_dir: Path, port: int) -> list[str]:
    flags = _flags(configuration, train_args, output_dir)
    return [*_torchrun(configuration.nproc, port), "-m", "trainer.cli.train_sft", *flags]


def _torchrun(nproc: int, port: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(nproc), "--master_port", str(port)]
    return [sys.executable, *launcher]


def _flags(configuration: Configuration, train_args: list[str], output_dir: Path) -> list[str]:
    return [*train_args, *configuration.args, *_outputs(output_dir / configuration.name)]


def _outputs(folder: Path) -> list[str]:
    return ["--output_dir", str(folder), "--parity_dump", str(folder / "parity")]


def free_port() -> int:
    """Return a free port below the range that the kernel gives to clients, so that no other process takes it meanwhile.

    The system's random numbers keep two forks of one process from the same choice.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(20000, 32000)
            probe.bind(("", port))
            return port


def run_jobs(jobs: list[Job], cwd: Path, num_parallel: int, timeout: float) -> Iterator[tuple[Job, Outcome]]:
    """Yield each job when it ends. An early exit (error, Ctrl-C, SIGTERM) kills the jobs that still run."""
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            while waiting and len(running) < num_parallel:
                running.append(_start(waiting.pop(0), cwd))
            for entry in list(running):
                outcome = _poll(entry, timeout)
                if outcome is not None:
                    running.remove(entry)
                    yield entry.job, outcome
            time.sleep(0.05)
    finally:
        for entry in running:
            kill_tree(entry.process)


def _start(job: Job, cwd: Path) -> _Running:
    with job.log.open("w") as log:
        process = subprocess.Popen(
            job.command(),
            cwd=cwd,
            env=job.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(job, process, time.monotonic())


def _poll(entry: _Running, timeout: float) -> Outcome | None:
    code, seconds = entry.process.poll(), time.monotonic() - entry.started
    timeout *= entry.job.num_sharing
    if code is None and seconds < timeout:
        return None
    if code is None:
        kill_tree(entry.process)
        return Outcome(seconds, f"timed out after {timeout:g} s")
    return Outcome(seconds, None if code == 0 else last_error(entry.job.log, code))


def kill_tree(process: subprocess.Popen) -> None:
    """End a process group and every descendant. torchrun starts each rank in its own session."""
    pids = _descendants(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pids |= _descendants(process.pid)
        _signal_group(process.pid, signal.SIGKILL)
    for pid in pids:
        _signal_group(pid, signal.SIGKILL)
    process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the group that `pid` leads. A pid that leads no group gets the signal through its group's leader."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _descendants(root: int) -> set[int]:
    """Pids below `root`, from /proc. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid ...": the name may contain spaces and brackets
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # this process has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = set(), [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def error_of_run(log: Path, number: int) -> str | None:
    """Why run `number` (from 0) of a shared launch failed. None if it never began."""
    _, begins, rest = log.read_text(errors="replace").partition(RUN_BEGINS.format(number))
    return _last_error(rest.partition(RUN_BEGINS.format(number + 1))[0], 1) if begins else None


def last_error(log: Path, code: int) -> str:
    """The line that best explains why a command failed: the trainer's error line, else the last exception."""
    return _last_error(log.read_text(errors="replace"), code)


def _last_error(text: str, code: int) -> str:
    lines = [RANK_PREFIX.sub("", line).strip() for line in text.splitlines()]
    reported = [line for line in lines if ERROR_LINE.search(line)][:1]  # later ones are the same error on other ranks
    exceptions = [line for line in lines if EXCEPTION.search(line) and "ChildFailedError" not in line]
    first_hand = [line for line in exceptions if not SECOND_HAND.search(line)]
    exit_codes = [f"a rank ended with exit code {match[1]}" for line in lines if (match := EXIT_CODE.search(line))]
    for candidates in (reported, first_hand, exit_codes, exceptions, [line for line in lines if line]):
        if candidates:
            return candidates[-1].removeprefix("error: ")[:500]
    return f"exit code {code}, and an empty log"

"""Each operation on the files of a run fails once: python test/fault_runs.py fsdp2|deepspeed [--ranks N --rank R]

A run resumes from step 2, trains two steps, saves step 4, removes step 2 and ends. For each number n, its operation
number n in the run folder fails with ENOSPC, with EIO, and by SIGKILL; see fault_layer.py. At the same n, the clock
jumps an hour back, and a day on, which brings no save by --save_interval_minutes. Then:

- The run ends well, or with exit code 2 and one line, or by the kill. With several ranks, the fault is on rank R only.
  All ranks go on, or all end: as under torchrun, a rank that fails ends the others by SIGTERM.
- A run whose clock jumps ends well, and keeps its newest checkpoint only.
- An intact checkpoint is there: the old one, or the new one.
- The same command, without a fault, resumes and ends. Its losses and weights are bitwise those of an undisturbed run.

Each run is a fork of one process, which has the imports and the parsed flags. `--sample N` takes N faults at random, and `--minutes N` as many
as fit. Flags after -- are added to those of the run.
"""

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from fault_layer import JUMPS, KINDS, READ, FaultLayer
from launch import read_steps

from trainer import entry
from trainer.checkpoints import checkpoint_store as store
from trainer.cli import train_sft
from trainer.compare.machines.forked_ranks import import_libraries, write_all_to
from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo
from trainer.training.checkpointing import Checkpoints

COMPARED = ("loss", "grad_norm", "lr", "batch_hash", "tokens_seen")


def forked(
    flags: list[str],
    log: Path,
    seconds: int,
    num_ranks: int,
    rank: int,
    layer: FaultLayer,
    at_end: Callable[[], None],
    stop_at: int,
) -> tuple[list[int], str]:
    """(exit codes, output) of forks that run train_sft as ranks. The layer is on one rank, from its Checkpoints on.

    That rank calls `at_end` as it ends well. With `stop_at`, the run ends after that step. Raises AssertionError
    for a run that takes longer than `seconds`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log.unlink(missing_ok=True)
    port, pids = free_port(), []
    for number in range(num_ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number), MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1")
            os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
            _be_rank(flags, log, seconds, layer if number == rank else None, at_end, stop_at)
    codes, deadline = {}, time.monotonic() + seconds
    while len(codes) < num_ranks:
        for pid in (pid for pid in pids if pid not in codes):
            if (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        late = time.monotonic() > deadline
        if late or any(codes.values()):  # torchrun ends the other ranks too
            time.sleep(0.1)
            for pid in (pid for pid in pids if pid not in codes):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.005)
    assert not late, f"a run hangs:\n{log.read_text()[-3000:]}"
    return [codes[pid] for pid in pids], log.read_text()


def _be_rank(
    flags: list[str], log: Path, seconds: int, layer: FaultLayer | None, at_end: Callable[[], None], stop_at: int
) -> NoReturn:
    write_all_to(log)
    real_init, real_after = Checkpoints.__init__, Checkpoints.after_step

    def init(self, *rest) -> None:
        if layer:
            layer.install()
        real_init(self, *rest)

    def after_step(self, progress, *rest, **named) -> None:
        real_after(self, progress, *rest, **named)
        if progress.step == stop_at:
            end_together()

    def end_together() -> NoReturn:
        dist.barrier()
        time.sleep(0.2 * (dist.get_world_size() > 1))  # a connection that closes early fails the other rank
        os._exit(0)

    def end_well() -> NoReturn:
        if layer:
            at_end()
        end_together()

    Checkpoints.__init__, Checkpoints.after_step = init, after_step
    entry.leave, entry.end_well = os._exit, end_well
    try:
        entry.run_command(train_sft.run, flags)
    finally:
        os._exit(99)


class Runs:
    """The runs of one command line, whose run folder is `folder/run`. Faults are on one rank."""

    def __init__(self, folder: Path, flags: list[str], seconds: int, num_ranks: int, rank: int):
        self.folder, self.run, self.begun = folder, folder / "run", folder / "begun"
        self.seconds, self.num_ranks, self.rank, self.endings = seconds, num_ranks, rank, Counter()
        self.flags, self.counts, self.failures = [*flags, "--output_dir", str(self.run)], Counter(), 0
        parsed = train_sft.parse(self.flags)  # a third of the time of a run
        train_sft.parse = lambda _: parsed
        gc.collect()
        gc.freeze()  # else the forks copy what their collectors look at

    def start(self, kind: str = "", number: int = 0, *, again: bool = False, stop_at: int = 0) -> tuple[list[int], str]:
        """Run with a fault, in the folder as it is, or in a copy of `begun` (again)."""
        if again:
            shutil.rmtree(self.run, ignore_errors=True)
            shutil.copytree(self.begun, self.run, symlinks=True)
        layer, seen = FaultLayer(self.run, kind, number), self.folder / "operations.json"
        ranks = (self.seconds, self.num_ranks, self.rank, layer)
        return forked(self.flags, self.folder / "log", *ranks, lambda: seen.write_text(json.dumps(layer.seen)), stop_at)

    def all(self, kinds: list[str], sample: int, minutes: float, seed: int) -> None:
        """Run with each fault, or with a sample of them, or with those that fit into the minutes."""
        codes, output = self.start()
        assert not any(codes), output
        expected = self.result()
        shutil.rmtree(self.run)
        codes, output = self.start(stop_at=2)
        assert not any(codes), output
        shutil.copytree(self.run, self.begun)
        codes, output = self.start(again=True)
        assert not any(codes) and self.result() == expected, output
        seen = json.loads((self.folder / "operations.json").read_text())
        points = [(kind, n) for n, (operation, _) in enumerate(seen, start=1) for kind in kinds
                  if kind != "ENOSPC" or operation != READ]  # fmt: skip
        if sample or minutes:
            points = random.Random(seed).sample(points, sample or len(points))
        until = time.monotonic() + 60 * (minutes or 1e9)
        for kind, number in points:
            if time.monotonic() > until:
                break
            what = f"{kind} at operation {number} of {len(seen)}: {' '.join(seen[number - 1])}"
            output = ""
            try:
                codes, output = self.start(kind, number, again=True)
                self.look(kind, codes, output)
                codes, resumed = self.start()
                assert not any(codes) and self.result() == expected, f"the resume:\n{resumed}"
                assert not list(self.run.rglob("*.tmp")), "a temporary file is left"
            except AssertionError as error:
                self.failures += 1
                print(f"--- {what}\n{output}\n{error}", flush=True)
            self.counts[kind] += 1
        operations = dict(Counter(operation for operation, _ in seen))
        counts = f"{sum(self.counts.values())} faults {dict(self.counts)}, {self.failures} failures"
        where = f"at {len(seen)} operations {operations} of rank {self.rank} of {self.num_ranks}"
        print(f"{counts}, {where}; {self.endings['goes on']} runs went on", flush=True)

    def look(self, kind: str, codes: list[int], output: str) -> None:
        """Check how a run with a fault ended, and what it left. All ranks end well, or none."""
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        goes_on, killed = not any(codes), kind == "kill"
        assert codes[self.rank] == -signal.SIGKILL if killed else goes_on or 2 in codes, f"exit codes {codes}"
        assert goes_on or set(codes) <= {-signal.SIGKILL, -signal.SIGTERM, 2, entry.EXIT_INTERRUPTED}, codes
        assert "Traceback" not in output and len(lines) == (2 in codes), "not one line"
        self.endings["goes on"] += goes_on
        root = str(self.run / "checkpoints")
        names = [os.path.basename(path) for path in store.list_checkpoints(root) if not store.find_damage(path)]
        if kind in JUMPS:
            saves_early = "step_3" in (self.folder / "operations.json").read_text()
            assert goes_on and names == ["step_4"] and not saves_early, f"exit codes {codes}, left: {names}"
        assert set(names) & {"step_2", "step_4"} and (not goes_on or "step_4" in names), f"left: {os.listdir(root)}"

    def result(self) -> tuple:
        """What must be the same: the rows of all steps, and the hashes of the last checkpoint's tensors."""
        rows = [[row[name] for name in COMPARED] for row in read_steps(self.run)]
        folder = str(self.run / "checkpoints/step_4")
        assert store.find_damage(folder) is None, store.find_damage(folder)
        files = store.read_manifest(folder)
        return rows, {name: entry for name, entry in files.items() if name.endswith(".safetensors")}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=["fsdp2", "deepspeed"])
    parser.add_argument("--sample", type=int, default=0, help="this many faults, at random")
    parser.add_argument("--minutes", type=float, default=0, help="as many faults as fit, at random")
    parser.add_argument("--seconds", type=int, default=120, help="one run must not take longer")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="the rank that has the faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("flags", nargs="*", help="more flags of train_sft, after --")
    args = parser.parse_args(argv)
    import_libraries()
    for name in ("runs.run_training", "strategies.fsdp2", "strategies.deepspeed", "methods.sft"):
        importlib.import_module(f"trainer.{name}")
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        flags = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
        flags += ["--max_len", "64", "--max_samples", "16", "--train_batch_size", "2"]
        flags += ["--micro_train_batch_size", "1", "--max_steps", "4", "--save_steps", "2", "--max_ckpt_num", "1"]
        flags += ["--save_interval_minutes", "600"]  # a clock that jumps makes no save
        flags += ["--no_save", "--learning_rate", "1e-3", "--load_checkpoint", "--backend", args.backend, *args.flags]
        runs = Runs(folder, flags, args.seconds, args.ranks, args.rank)
        runs.all(args.kinds, args.sample, args.minutes, args.seed)
        if runs.failures:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

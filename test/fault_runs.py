"""Each operation on the files of a run fails once: python test/fault_runs.py fsdp2|deepspeed [--sample N] [-- FLAGS]

A run resumes from step 2, trains two steps, saves step 4, removes step 2 and ends. For each number n, its operation
number n in the run folder fails with ENOSPC, with EIO, and by SIGKILL; see fault_layer.py. Then:

- The process ends well, or with exit code 2 and one line, or by the kill.
- An intact checkpoint is there: the old one, or the new one.
- The same command, without a fault, resumes and ends. Its losses and weights are bitwise those of an undisturbed run.

Each run is a fork of one process, which has the imports. `--sample N` takes N faults at random.
"""

import argparse
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

from fault_layer import KINDS, READ, FaultLayer
from launch import read_steps

from trainer import entry
from trainer.checkpoints import checkpoint_store as store
from trainer.cli import train_sft
from trainer.compare.machines.forked_ranks import import_libraries
from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo
from trainer.training.checkpointing import Checkpoints

SECONDS = 120  # of one run
COMPARED = ("loss", "grad_norm", "lr", "batch_hash", "tokens_seen")


def forked(flags: list[str], log: Path, layer: FaultLayer, at_end: Callable[[], None], stop_at: int) -> tuple[int, str]:
    """(exit code, output) of a fork that runs train_sft. The layer begins where the run makes its Checkpoints.

    `at_end` is called as it ends well. With `stop_at`, it ends after that step.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        deadline = time.monotonic() + SECONDS
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"a run hangs:\n{log.read_text()[-3000:]}")
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(found[1]), log.read_text()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    real_init, real_after = Checkpoints.__init__, Checkpoints.after_step

    def init(self, *rest) -> None:
        layer.install()
        real_init(self, *rest)

    def after_step(self, progress, *rest, **named) -> None:
        real_after(self, progress, *rest, **named)
        if progress.step == stop_at:
            os._exit(0)

    def end_well() -> None:
        at_end()
        os._exit(0)

    Checkpoints.__init__, Checkpoints.after_step = init, after_step
    entry.leave, entry.end_well = os._exit, end_well
    try:
        entry.run_command(train_sft.run, flags)
    finally:
        os._exit(99)


class Runs:
    """The runs of one command line, whose run folder is `folder/run`."""

    def __init__(self, folder: Path, flags: list[str]):
        self.folder, self.run, self.begun = folder, folder / "run", folder / "begun"
        self.flags, self.counts, self.failures = [*flags, "--output_dir", str(self.run)], Counter(), 0

    def start(self, kind: str = "", number: int = 0, *, again: bool = False, stop_at: int = 0) -> tuple[int, str]:
        """Run with a fault, in the folder as it is, or in a copy of `begun` (again)."""
        if again:
            shutil.rmtree(self.run, ignore_errors=True)
            shutil.copytree(self.begun, self.run, symlinks=True)
        layer, seen = FaultLayer(self.run, kind, number), self.folder / "operations.json"
        return forked(self.flags, self.folder / "log", layer, lambda: seen.write_text(json.dumps(layer.seen)), stop_at)

    def all(self, kinds: list[str], sample: int, seed: int) -> None:
        """Run with each fault, or with a sample of them."""
        code, output = self.start()
        assert code == 0, output
        expected = self.result()
        shutil.rmtree(self.run)
        code, output = self.start(stop_at=2)
        assert code == 0, output
        shutil.copytree(self.run, self.begun)
        code, output = self.start(again=True)
        assert code == 0 and self.result() == expected, output
        seen = json.loads((self.folder / "operations.json").read_text())
        points = [(kind, n) for n, (operation, _) in enumerate(seen, start=1) for kind in kinds
                  if kind != "ENOSPC" or operation != READ]  # fmt: skip
        for kind, number in random.Random(seed).sample(points, sample) if sample else points:
            what = f"{kind} at operation {number} of {len(seen)}: {' '.join(seen[number - 1])}"
            ending = self.start(kind, number, again=True)
            try:
                self.look(kind, *ending)
                code, resumed = self.start()
                assert code == 0 and self.result() == expected, f"the resume:\n{resumed}"
                assert not list(self.run.rglob("*.tmp")), "a temporary file is left"
            except AssertionError as error:
                self.failures += 1
                print(f"--- {what}\n{ending[1]}\n{error}", flush=True)
            self.counts[kind] += 1
        operations = dict(Counter(operation for operation, _ in seen))
        print(
            f"{sum(self.counts.values())} faults {dict(self.counts)} at {len(seen)} operations {operations}", flush=True
        )

    def look(self, kind: str, code: int, output: str) -> None:
        """Check how a run with a fault ended, and what it left."""
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert code in ((-signal.SIGKILL,) if kind == "kill" else (0, 2)), f"exit code {code}"
        assert "Traceback" not in output and len(lines) == (code == 2), "not one line"
        root = str(self.run / "checkpoints")
        names = [os.path.basename(path) for path in store.list_checkpoints(root) if not store.find_damage(path)]
        assert set(names) & {"step_2", "step_4"} and (code or "step_4" in names), f"left: {os.listdir(root)}"

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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("flags", nargs="*", help="more flags of train_sft, after --")
    args = parser.parse_args(argv)
    import_libraries()
    for name in ("trainer.runs.run_training", "trainer.strategies.fsdp2", "trainer.strategies.deepspeed"):
        importlib.import_module(name)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        flags = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
        flags += ["--max_len", "64", "--max_samples", "16", "--train_batch_size", "2", "--micro_train_batch_size", "2"]
        flags += [
            "--max_steps",
            "4",
            "--save_steps",
            "2",
            "--max_ckpt_num",
            "1",
            "--no_save",
            "--learning_rate",
            "1e-3",
        ]
        Runs(folder, [*flags, "--load_checkpoint", "--backend", args.backend, *args.flags]).all(
            args.kinds, args.sample, args.seed
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Each operation on the files of `export` fails once: python test/export_faults.py [--sample N]

For each number n, operation number n below the folder of OUT fails with ENOSPC, with EIO, and by SIGKILL; see
fault_layer.py. The sources are a model, an adapter, and a checkpoint that becomes a model or a portable checkpoint. Then:

- The command ends well, or with exit code 2 and one line, or by the kill.
- OUT is whole, or it is not there.
- The same command, without a fault, writes a whole OUT, and leaves no temporary folder. It refuses an OUT that is there.

Whole means: the files have the hashes of an export without faults. Each run is a fork of one process, which has the imports.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NoReturn

from fault_layer import READ, FaultLayer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer import entry
from trainer.checkpoints import checkpoint_store as store
from trainer.cli import export, train_sft
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks, write_all_to
from trainer.datasets.demos.demo import make_demo
from trainer.runs import exported_models  # noqa: F401  the forks have it

KINDS = ("ENOSPC", "EIO", "kill")


def make_sources(folder: Path) -> dict[str, list[str]]:
    """The first arguments of `export` for each kind of source."""
    make_demo(str(folder / "demo"))
    model = AutoModelForCausalLM.from_pretrained(folder / "demo/model")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    (folder / "adapter/README.md").write_text("---\nlibrary_name: peft\n---\nHow it was trained.\n")
    flags = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
    flags += ["--max_samples", "2", "--train_batch_size", "2", "--save_steps", "1", "--no_save", "--backend", "fsdp2"]
    flags += ["--param_dtype", "fp32", "--device", "cpu", "--output_dir", f"{folder}/run"]
    ending = run_ranks(lambda: train_sft.run(flags), 1, folder / "log", 120)
    assert ending.kind == "done", (folder / "log").read_text()[-3000:]
    checkpoint = f"{folder}/run/checkpoints/step_1"
    return {
        "a model": [f"{folder}/demo/model"],
        "an adapter": [f"{folder}/adapter"],
        "a checkpoint": [checkpoint],
        "a portable checkpoint": [checkpoint, "--portable"],
    }


def forked(argv: list[str], log: Path, layer: FaultLayer, seen: Path) -> tuple[int, str]:
    """(exit code, output) of `export` in a fork with the layer. It writes the layer's operations to `seen` as it ends."""

    def end_well() -> NoReturn:
        seen.write_text(json.dumps(layer.seen))
        os._exit(0)

    log.unlink(missing_ok=True)
    sys.stdout.flush()
    if not (pid := os.fork()):
        write_all_to(log)
        entry.leave, entry.end_well = os._exit, end_well  # exit handlers would remove the folder of this process
        signal.alarm(60)  # it ends a command that hangs
        layer.install()
        try:
            entry.run_command(export.run, argv)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), log.read_text()


def hashes(folder: Path) -> dict[str, str]:
    """Of all files below a folder. A manifest may have its entries in another order."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != store.MANIFEST
    }


class Exports:
    """Runs of `export` to the folder `places/out`, where faults may come."""

    def __init__(self, folder: Path):
        self.places, self.log, self.seen = folder / "places", folder / "log", folder / "operations.json"
        self.out, self.endings, self.failures = self.places / "out", Counter(), 0

    def start(self, argv: list[str], kind: str = "", number: int = 0) -> tuple[int, str]:
        return forked([*argv, str(self.out)], self.log, FaultLayer(self.places, kind, number), self.seen)

    def all(self, name: str, argv: list[str], dice: random.Random, sample: int) -> None:
        """Each fault of one source, or a sample of them."""
        self.renew()
        code, output = self.start(argv)
        assert code == 0, output
        whole, seen = hashes(self.out), json.loads(self.seen.read_text())
        points = [(kind, n) for n, (operation, _) in enumerate(seen, start=1) for kind in KINDS
                  if kind != "ENOSPC" or operation != READ]  # fmt: skip
        for kind, number in dice.sample(points, sample or len(points)):
            what = f"{name}: {kind} at operation {number} of {len(seen)}: {' '.join(seen[number - 1])}"
            try:
                self.one(argv, kind, number, whole)
            except AssertionError as error:
                self.failures += 1
                print(f"--- {what}\n{self.log.read_text()[-2000:]}\n{error}", flush=True)
        print(f"{name}: {sample or len(points)} faults at {len(seen)} operations", flush=True)

    def one(self, argv: list[str], kind: str, number: int, whole: dict[str, str]) -> None:
        self.renew()
        code, output = self.start(argv, kind, number)
        lines = [line for line in output.splitlines() if line.startswith("error: ")]
        assert code == -signal.SIGKILL if kind == "kill" else code in (0, 2), f"exit code {code}"
        assert "Traceback" not in output and len(lines) == (code == 2), "not one line"
        assert code or self.out.exists(), "it says that it wrote, and did not"
        if self.out.exists():
            assert hashes(self.out) == whole, "OUT is not whole"
        self.endings["well" if code == 0 else "one line" if code == 2 else "killed"] += 1
        there = self.out.exists()
        code, output = self.start(argv)
        assert code == (2 if there else 0), f"the command again: exit code {code}\n{output}"
        assert hashes(self.out) == whole and [path.name for path in self.places.iterdir()] == ["out"], "not whole"

    def renew(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.places)
        self.places.mkdir()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=0, help="this many faults of each source, at random")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import_libraries()
    with tempfile.TemporaryDirectory() as name:
        exports, dice = Exports(Path(name)), random.Random(args.seed)
        for source, given in make_sources(Path(name)).items():
            exports.all(source, given, dice, args.sample)
        print(
            f"{sum(exports.endings.values())} faults {dict(exports.endings)}, {exports.failures} failures", flush=True
        )
        if exports.failures:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

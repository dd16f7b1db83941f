"""SIGKILL at random moments, during saves too, of one rank or of everything; then the same command again.

    python test/kill_test.py --backend fsdp2|deepspeed [--count 25] [--seed 0] [--zero_stage N] [--async_save] [--hf] [--vision]

Runs of 60 steps on 2 ranks are killed `count` times in all and started again blindly, until each has ended. Every second
kill hits torchrun and all ranks, the others one rank. Every joined loss curve must be bitwise that of the undisturbed run,
and after the death of one rank all must be gone within 30 s. With --hf, each checkpoint has a Hugging Face folder, whose
files both ranks write. Those that are left at the end must be byte for byte those of the undisturbed run.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from launch import LAUNCHER, ROOT, _environment, forked, read_rows, read_steps

from trainer.checkpoints import checkpoint_store as store
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.demos.vision_demo import make_vision_demo

STEPS, SAVE_STEPS, RANKS = 60, 3, 2
GONE_WITHIN_SECONDS = 30
HF = "--save_hf_ckpt"
VISION = {"--freeze_vision", "false"}  # "-" sorts before "f"
ROW_BYTES = 400  # of one step in metrics.jsonl, about


def command_line(folder: Path, name: str, flags: list[str]) -> list[str]:
    demo = folder / "demo"
    data = ["--dataset", f"{demo}/train.jsonl"] if set(flags) >= VISION else ["--dataset", f"{demo}/sft.jsonl"]
    data += [] if set(flags) >= VISION else ["--apply_chat_template"]
    program = [str(ROOT / "test/small_shards.py")] if HF in flags else ["-m", "trainer.cli.train_sft"]
    line = [*program, "--pretrain", f"{demo}/model", *data]
    line += ["--max_len", "128", "--max_samples", "200", "--max_steps", str(STEPS)]
    line += ["--train_batch_size", "8", "--micro_train_batch_size", "4", "--learning_rate", "2e-3", "--no_save"]
    line += ["--save_steps", str(SAVE_STEPS), "--max_ckpt_num", "2", "--output_dir", str(folder / name)]
    return [*line, *flags]


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def start(arguments: list[str], log: Path, **env: str) -> subprocess.Popen:
    command = [*LAUNCHER, str(RANKS), *arguments]
    with log.open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=_environment(**env), start_new_session=True)


def wait_for(condition, process: subprocess.Popen, seconds: float, pause: float = 0.02) -> bool:
    """Whether `condition` came true before the process ended or the time was over. Each look takes time of a core."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(pause)
    return False


def choose_moment(generator: random.Random, process: subprocess.Popen, run: Path) -> str:
    """Wait for a random moment: while starting, while training, or while a checkpoint is being written."""
    log = run / "metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    new_bytes = generator.randint(1, 12) * ROW_BYTES
    kind = generator.choices(["starting", "training", "saving"], [1, 4, 5])[0]
    if kind == "starting":
        time.sleep(generator.uniform(0, 10))
        return kind
    wait_for(lambda: log.exists() and log.stat().st_size > size + new_bytes, process, 120)
    time.sleep(generator.uniform(0, 0.2))
    if kind == "saving":
        wait_for(lambda: any((run / "checkpoints").glob("step_*.tmp")), process, 10, pause=0.0005)
        time.sleep(generator.uniform(0, 0.01))
    return kind


def kill(generator: random.Random, process: subprocess.Popen, everything: bool) -> str:
    """SIGKILL one rank, or torchrun and all ranks; returns who it was."""
    wait_for(lambda: len(children(process.pid)) == RANKS, process, 60)
    ranks = children(process.pid)
    victims = [process.pid, *ranks] if everything else [generator.choice(ranks)]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    process.wait(timeout=GONE_WITHIN_SECONDS + 30)
    seconds = time.monotonic() - killed_at
    assert seconds < GONE_WITHIN_SECONDS, f"{seconds:.0f} s until all were gone"
    for pid in ranks:  # a dead torchrun leaves its ranks behind if only it was killed
        assert pid in victims or not Path(f"/proc/{pid}").exists(), f"rank process {pid} outlived torchrun"
    return "all" if everything else f"one rank, all gone after {seconds:.1f} s"


def disturbed_run(generator: random.Random, folder: Path, name: str, flags: list[str], done: int, count: int) -> int:
    """Run to the end with kills on the way, after the `done` ones of earlier runs; returns how many there are now."""
    arguments, log = [*command_line(folder, name, flags), "--load_checkpoint"], folder / f"{name}.log"
    while True:
        process = start(arguments, log)
        if done < count:
            kind = choose_moment(generator, process, folder / name)
            if process.poll() is None:
                done += 1
                victim = kill(generator, process, everything=done % 2 == 1)
                print(f"kill {done}, {name}, while {kind}: {victim}", flush=True)
                continue
        if process.wait(timeout=300) == 0:
            return done
        raise AssertionError(f"{name} failed:\n{log.read_text()[-5000:]}")


def assert_same_curve(folder: Path, name: str) -> None:
    expected, rows = read_steps(folder / "undisturbed"), read_steps(folder / name)
    assert len(rows) == len(expected) == STEPS
    for row, other in zip(rows, expected):
        for key in ("batch_hash", "loss", "grad_norm", "lr", "tokens_seen", "epoch"):
            assert row[key] == other[key], (name, row["step"], key, row[key], other[key])
    stray = list((folder / name).rglob("*.tmp"))
    assert not stray, stray


def assert_same_hf_folders(folder: Path, name: str) -> None:
    """Both checkpoints that are left have whole files, and the Hugging Face folders of the undisturbed run."""
    kept = sorted((folder / "undisturbed/checkpoints").glob("step_*"))
    assert [path.name for path in kept] == [
        path.name for path in sorted((folder / name / "checkpoints").glob("step_*"))
    ]
    for expected in kept:
        found = folder / name / "checkpoints" / expected.name
        assert store.find_damage(str(found)) is None
        files = {path.name: path.read_bytes() for path in (expected / "hf").iterdir()}
        assert files == {path.name: path.read_bytes() for path in (found / "hf").iterdir()}
        assert sum(file.endswith(".safetensors") for file in files) > 2 * RANKS, files.keys()


def kill_test(folder: Path, flags: list[str], count: int, seed: int) -> None:
    generator = random.Random(seed)
    (make_vision_demo if set(flags) >= VISION else make_demo)(str(folder / "demo"))
    code, output = forked(RANKS, *command_line(folder, "undisturbed", flags), timeout=300)
    assert code == 0, output[-5000:]
    done = number = 0
    while done < count:
        number += 1
        done = disturbed_run(generator, folder, f"run-{number}", flags, done, count)
        assert_same_curve(folder, f"run-{number}")
        if HF in flags:
            assert_same_hf_folders(folder, f"run-{number}")
        resumed = sum(row.get("event") == "resume" for row in read_rows(folder / f"run-{number}"))
        print(f"run {number}: bitwise the undisturbed curve, {resumed} resumes, {done} of {count} kills", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--zero_stage")
    parser.add_argument("--async_save", action="store_true")
    parser.add_argument("--hf", action="store_true", help="with Hugging Face folders that several ranks write")
    parser.add_argument("--vision", action="store_true", help="rows with images, and a tower that trains")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    flags = ["--backend", args.backend, *(["--zero_stage", args.zero_stage] if args.zero_stage else [])]
    flags += sorted(VISION) * args.vision + [HF] * args.hf
    with tempfile.TemporaryDirectory() as folder:
        kill_test(Path(folder), flags + ["--async_save"] * args.async_save, args.count, args.seed)


if __name__ == "__main__":
    main()

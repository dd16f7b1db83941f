"""Random damage to checkpoints, model folders and certificates: python test/fuzz_folders.py [--count 1000] [--seed 0]

Each case changes a file: bits flip, it is cut, bytes come in, or a value of its JSON becomes another. Half of the cases
are of a stranger: the hashes that cover the file are then made to fit. A case is right if it is

- noticed: one line (UserError), or `verify_run` says that something differs; or
- harmless: what is read is the same as before. A stranger's values may also be read, if they are of the right form.

Anything else is a failure: another exception, no end, or damage without a stranger that nobody notices.
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from random_damage import Cases, damage, run_in_rank
from transformers import AutoModelForCausalLM

from trainer.checkpoints import checkpoint_store as store
from trainer.cli import train_sft
from trainer.compare.certificates.verification import verify
from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.datasets.conversations.templates import prepare_tokenizer
from trainer.datasets.demos.demo import make_demo
from trainer.models.model_loading import check_code, load_tokenizer, resolve_model_folder
from trainer.reports import certificate
from trainer.runs import run_training
from trainer.runs.run_models import load_model
from trainer.training.checkpointing import Checkpoints


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- cases


class FolderCases(Cases):
    """Cases of folders."""

    def checkpoint(self, checkpoints: Checkpoints, source: Path, work: Path) -> None:
        folder = copied(source, work / "step_2")
        is_stranger, path = self.dice.random() < 0.5, self.dice.choice(files_of(folder))
        before = path.read_bytes()
        what = damage(self.dice, path)
        is_same = path.read_bytes() == before
        if is_stranger:
            seal_checkpoint(folder, path.name == store.MANIFEST)

        def read() -> str:
            checkpoints.load(str(folder))
            return "read" if is_stranger else "harmless" if is_same else "not noticed"

        self.case("a stranger's checkpoint" if is_stranger else "checkpoint", what, read)

    def model(self, args, setup, source: Path, work: Path) -> None:
        folder = copied(source, work / "model")
        what = damage(self.dice, self.dice.choice(files_of(folder)))

        def read() -> str:
            place = resolve_model_folder(str(folder))
            check_code(place, "--pretrain", False)
            tokenizer = load_tokenizer(place)
            prepare_tokenizer(tokenizer, None, None, False)
            load_model(
                args.model, dataclasses.replace(setup, folder=place, tokenizer=tokenizer), place, AutoModelForCausalLM
            )
            return "read"

        self.case("model folder", what, read)

    def certificate(self, source: Path, work: Path) -> None:
        run = copied(source, work / "certified")
        path = run / self.dice.choice([certificate.FILE, certificate.FILE, "metrics.jsonl", "config.yaml"])
        before, is_stranger = path.read_bytes(), self.dice.random() < 0.5
        what = damage(self.dice, path)
        if is_stranger:
            seal_certificate(run)

        def read() -> str:
            differences = [found for found in verify(str(run)).values() if found]
            if differences:
                return (
                    "noticed" if all(isinstance(line, str) for found in differences for line in found) else "no texts"
                )
            return "read" if is_stranger else "harmless" if same_content(before, path.read_bytes()) else "not noticed"

        self.case("a stranger's certificate" if is_stranger else "certificate", what, read)


def copied(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return folder


def same_content(one: bytes, other: bytes) -> bool:
    with contextlib.suppress(ValueError):
        return json.loads(one) == json.loads(other)
    return one == other


def seal_checkpoint(folder: Path, own_only: bool) -> None:
    """Make the hashes of a checkpoint fit its files, or only that of its manifest."""
    path = folder / store.MANIFEST
    with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
        content = json.loads(path.read_bytes())
        content.pop("blake2b", None)
        if not own_only:
            names = store.files_below(str(folder))
            content["files"] = {name: store.hash_file(str(folder / name)) for name in names if name != store.MANIFEST}
        path.write_bytes(store._manifest_bytes(content))


def seal_certificate(run: Path) -> None:
    path = run / certificate.FILE
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        content = json.loads(path.read_bytes())
        content["files"] = certificate.hash_run_files(str(run)) if isinstance(content.get("files"), dict) else 0
        path.write_text(json.dumps(content | {"blake2b": certificate.own_hash(content)}))


# --- the process


class Done(Exception):
    """All cases are over."""


def run_cases(folder: Path, flags: list[str], count: int, seed: int) -> None:
    """All cases, in a run that stands where it would resume."""
    cases, captured = FolderCases(seed), {}
    real_set_up, started = run_training.set_up, time.monotonic()

    def set_up(command, args, **named):
        captured["args"], captured["setup"] = args, real_set_up(command, args, **named)
        return captured["setup"]

    def resume(checkpoints: Checkpoints, *_) -> None:
        work = folder / "work"
        work.mkdir()
        for number in range(count):
            if number % 2 == 0:
                cases.checkpoint(checkpoints, folder / "run/checkpoints/step_2", work)
            elif number % 4 == 1:
                cases.model(captured["args"], captured["setup"], folder / "demo/model", work)
            else:
                cases.certificate(folder / "run", work)
        cases.report(time.monotonic() - started)
        raise Done

    run_training.set_up, Checkpoints.resume = set_up, resume
    with contextlib.suppress(Done):
        train_sft.run(
            [*flags, "--output_dir", str(folder / "other"), "--load_checkpoint", str(folder / "run/checkpoints/step_2")]
        )


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    import_libraries()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_demo(str(folder / "demo"))
        flags = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--apply_chat_template"]
        flags += ["--max_len", "64", "--max_samples", "16", "--train_batch_size", "2", "--micro_train_batch_size", "2"]
        flags += ["--max_steps", "3", "--save_steps", "2", "--no_save", "--param_dtype", "fp32"]
        own = [*(flag for flag in flags if flag != "--no_save"), "--output_dir", str(folder / "run"), "--certificate"]
        ending = run_ranks(lambda: train_sft.run(own), 1, folder / "log", 100)
        assert ending.kind == "done", (folder / "log").read_text()
        run_in_rank(lambda: run_cases(folder, flags, args.count, args.seed), folder / "cases", 520)


if __name__ == "__main__":
    main(sys.argv[1:])

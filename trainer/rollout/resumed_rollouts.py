"""Rollouts generated after the last checkpoint. A resumed run trains on them instead of generating them again.

So nothing that was generated, scored or paid for is lost. rollouts.jsonl has the rollouts whose training had begun. With
--max_staleness, each rank also writes to `<output_dir>/ahead/` what its thread has generated ahead. The resumed run repeats
the same updates, so it reaches the same weights. A chain of digests proves it: each sample has the `link` of the history
of the weights that generated it.
"""

import contextlib
import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from trainer.checkpoints.user_modules import module_files
from trainer.comma_separated import names_in
from trainer.distributed.collectives import broadcast_object
from trainer.metrics import ROLLOUTS_FILE
from trainer.rollout.placement import hold, without_tokens
from trainer.rollout.rollouts_file import as_row, sample_of
from trainer.rollout.samples import Sample

AHEAD_FOLDER = "ahead"
FIRST_KEY = re.compile(r'\{"rollout": (\d+),')  # rows of earlier rollouts are not parsed
# flags that decide nothing about samples
PLACES = ("output_dir", "sync_folder", "load_checkpoint", "overwrite", "allow_change")


def origin_of(flags: dict) -> str:
    """A digest of what decides samples and weights: the flags, the number of ranks, and the files that flags name (broadcast).

    A Python file counts with its text and that of the modules beside it that it needs, any other file with its size and
    time. A folder counts with its files. Rank 0 reads them.
    """
    digest = hashlib.blake2b(f"{dist.get_world_size()} ranks\n".encode(), digest_size=8)
    for name, value in sorted(flags.items()):
        if name not in PLACES:
            digest.update(f"{name}={value!r}\n".encode())
            for part in names_in(str(value)):  # FILE.py:NAME, or several, or NAME=FILE.py
                path = Path(part.split(":")[0].split("=")[-1].strip())
                is_code = path.suffix == ".py" or name == "env"
                code = module_files(str(path), is_module=name == "env")[1] if is_code else []
                with contextlib.suppress(OSError):  # most values are no path
                    for file in map(Path, code) if code else sorted(path.iterdir()) if path.is_dir() else [path]:
                        facts = (file.name, file.stat().st_size, file.stat().st_mtime_ns)
                        digest.update(file.read_bytes() if file.suffix == ".py" else repr(facts).encode())
    return broadcast_object(digest.hexdigest())


def link_of(history: str, origin: str) -> str:
    """The mark of samples that weights with this history generate in a run with this origin."""
    return hashlib.blake2b(f"{history} {origin}".encode(), digest_size=8).hexdigest()


def history_after(link: str, samples: list[Sample]) -> str:
    """The history of the weights once they are trained on these samples too. It needs no tokens."""
    facts = [(sample.size().digest, float(sample.score).hex()) for sample in samples]
    return hashlib.blake2b(f"{link} {facts}".encode(), digest_size=8).hexdigest()


class AheadFiles:
    """The rollouts that the threads have generated and that are not trained yet: one file for each rank's part of one."""

    def __init__(self, output_dir: str):
        self._folder = Path(output_dir, AHEAD_FOLDER)

    def write(self, rollout: int, samples: list[Sample], links: dict[int, str], part: str = "") -> None:
        """`links`, by version, of the weights that generated the samples. On a full disk, the run goes on without the file.

        `part` is a name for it, if a rank has several.
        """
        path = self._folder / f"{rollout}-{dist.get_rank()}{part}.jsonl"
        rows = [as_row(sample, rollout, None) | {"origin": links[newest_version(sample)]} for sample in samples]
        try:
            self._folder.mkdir(exist_ok=True)
            with open(f"{path}.tmp", "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            os.replace(f"{path}.tmp", path)
        except OSError as error:
            print(f"{path}: {error.strerror}: a resumed run will generate these samples again", flush=True)

    def forget(self, before: int) -> None:
        """Remove the files of earlier rollouts. Only rank 0 does it."""
        for path in list(self._folder.glob("[0-9]*-*")) if dist.get_rank() == 0 else []:
            if int(path.name.split("-")[0]) < before:
                path.unlink(missing_ok=True)


def newest_version(sample: Sample) -> int | None:
    return max((version for _, version in sample.versions), default=None)


class ResumedRollouts(dict):
    """The samples of such rollouts, by number. Rank 0 has their tokens (see `placement`)."""

    def __call__(self, state) -> list[Sample] | None:
        """The samples of the next rollout, if it is one of these. The position in the prompts moves past it."""
        samples = self.pop(state.rollout, None)
        if samples is not None:
            state.prompts.take(state.prompts.batch_size)
            state.prompts.note(samples)
        return samples


def find_resumed(output_dir: str, state, group_size: int) -> ResumedRollouts:
    """The whole rollouts from `state.rollout` on that the run folder has, up to the first gap (broadcast from rank 0)."""
    whole: dict[int, list[Sample]] = {}
    if dist.get_rank() == 0:
        whole = _in_order(_read(output_dir, state.rollout), state, group_size)
    shown = broadcast_object({rollout: list(map(without_tokens, samples)) for rollout, samples in whole.items()})
    found = ResumedRollouts(whole if dist.get_rank() == 0 else shown)
    hold(itertools.chain.from_iterable(found.values()), 0)
    return found


def _read(output_dir: str, first: int) -> dict[int, list[tuple[bool, str, Sample]]]:
    """(whether it is from `ahead/`, link, sample) by rollout. Samples of the log come last. Torn rows are left out."""
    found: dict[int, list[tuple[bool, str, Sample]]] = {}
    ahead = list(Path(output_dir, AHEAD_FOLDER).glob("*.jsonl"))
    for path in [*ahead, Path(output_dir, ROLLOUTS_FILE)]:
        for line in _lines(path):
            start = FIRST_KEY.match(line)
            if start and int(start[1]) >= first:
                with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RuntimeError):
                    row = json.loads(line)
                    found.setdefault(row["rollout"], []).append((path in ahead, row["origin"], sample_of(row)))
    return found


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open() as file:
            yield from file


def _in_order(found: dict, state, group_size: int) -> dict[int, list[Sample]]:
    """The rollouts with a sample for each prompt whose turn it is, by weights that the resumed run reaches again."""
    order, histories, whole = copy.copy(state.prompts), dict(state.histories), {}
    for rollout in itertools.count(state.rollout):
        links = {version: link_of(history, state.origin) for version, history in histories.items()}
        fit = {
            sample.number: sample
            for is_ahead, link, sample in found.get(rollout, ())
            if link == links.get(newest_version(sample) if is_ahead else rollout)
        }
        samples = [sample for _, sample in sorted(fit.items())]
        rows = [prompt["row"] for prompt in order.take(order.batch_size) for _ in range(group_size)]
        if [(sample.number, sample.row) for sample in samples] != list(enumerate(rows)):
            return whole
        whole[rollout] = samples
        histories[rollout + 1] = history_after(links[rollout], samples)
        order.note(samples)

"""Rollouts that an earlier start of a run drew, and that no checkpoint has. A resumed run trains them as they were drawn.

So what was generated, scored or paid for is not lost. rollouts.jsonl has the rollouts whose training had begun. With
--max_staleness, each rank also writes to `<output_dir>/ahead/` what its thread has drawn ahead. The weights that drew them
come again, because the resumed run trains the same samples in the same order.
"""

import contextlib
import copy
import glob
import hashlib
import itertools
import json
import os
import re
from pathlib import Path

import torch.distributed as dist

from trainer.distributed.collectives import broadcast_object
from trainer.rollout.experience import Sample, as_row
from trainer.rollout.placement import without_tokens
from trainer.rollout.rollouts_file import ROLLOUTS_FILE, sample_of

AHEAD_FOLDER = "ahead"
FIRST_KEY = re.compile(r'\{"rollout": (\d+),')  # rows of earlier rollouts are not parsed
PLACES = ("output_dir", "load_checkpoint", "overwrite")  # flags that decide nothing about samples


def origin_of(flags: dict) -> str:
    """A digest of the flags that decide samples and weights, and of the Python files that they name.

    Rollouts of another origin are drawn again.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(flags.items()):
        if name not in PLACES:
            digest.update(f"{name}={value!r}\n".encode())
            files = [part for part in re.split(r"[\s,'\"\[\]]|:(?=\D)", str(value)) if part.endswith(".py")]
            for path in filter(os.path.isfile, files):
                digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class AheadFiles:
    """The rollouts that the thread of each rank has drawn and that are not trained yet, a file for each rank's part."""

    def __init__(self, output_dir: str, origin: str):
        self._folder, self._origin = os.path.join(output_dir, AHEAD_FOLDER), origin

    def write(self, rollout: int, samples: list[Sample]) -> None:
        os.makedirs(self._folder, exist_ok=True)
        path = os.path.join(self._folder, f"{rollout}-{dist.get_rank()}.jsonl")
        rows = [as_row(sample, rollout, None) | {"origin": self._origin} for sample in samples]
        with open(f"{path}.tmp", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(f"{path}.tmp", path)

    def forget(self, wanted=lambda rollout: False) -> None:
        """Remove the files of all rollouts but the wanted ones. Only rank 0 does it."""
        for path in glob.glob(os.path.join(self._folder, "*")) if dist.get_rank() == 0 else []:
            if not wanted(int(os.path.basename(path).split("-")[0])) or path.endswith(".tmp"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)


class DrawnBefore(dict):
    """The samples of such rollouts by number. Rank 0 has their tokens (see `placement`)."""

    def __call__(self, state) -> list[Sample] | None:
        """The samples of the next rollout, if it is one of these. The position in the prompts moves behind it."""
        samples = self.pop(state.rollout, None)
        if samples is not None:
            state.prompts.take(state.prompts.batch_size)
            state.prompts.note(samples)
        return samples


def drawn_before(output_dir: str, state, group_size: int, origin: str) -> DrawnBefore:
    """The whole rollouts from `state.rollout` on that the run folder has, up to the first gap (broadcast from rank 0)."""
    whole: dict[int, list[Sample]] = {}
    if dist.get_rank() == 0:
        whole = _in_order(_read(output_dir, state.rollout, origin), state, group_size)
    told = broadcast_object({rollout: list(map(without_tokens, samples)) for rollout, samples in whole.items()})
    found = DrawnBefore(whole if dist.get_rank() == 0 else told)
    for sample in itertools.chain.from_iterable(found.values()):
        sample.holder = 0
    return found


def _read(output_dir: str, first: int, origin: str) -> dict[int, dict[int, Sample]]:
    """Samples by rollout and number. Of a row that is there twice, the later one counts. Torn rows are left out."""
    found: dict[int, dict[int, Sample]] = {}
    ahead = sorted(glob.glob(os.path.join(output_dir, AHEAD_FOLDER, "*.jsonl")))
    for path in [*ahead, os.path.join(output_dir, ROLLOUTS_FILE)]:
        if not os.path.exists(path):
            continue
        with open(path) as file:
            for line in file:
                start = FIRST_KEY.match(line)
                if start and int(start[1]) >= first:
                    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RuntimeError):
                        row = json.loads(line)
                        if row.get("origin") == origin:
                            found.setdefault(row["rollout"], {})[row["number"]] = sample_of(row)
    return found


def _in_order(found: dict[int, dict[int, Sample]], state, group_size: int) -> dict[int, list[Sample]]:
    """The rollouts that have a sample for each prompt whose turn it is."""
    order, whole = copy.copy(state.prompts), {}
    order.rates = dict(order.rates)
    for rollout in itertools.count(state.rollout):
        samples = [sample for _, sample in sorted(found.get(rollout, {}).items())]
        rows = [prompt["row"] for prompt in order.take(order.batch_size) for _ in range(group_size)]
        if [(sample.number, sample.row) for sample in samples] != list(enumerate(rows)):
            return whole
        whole[rollout] = samples
        order.note(samples)

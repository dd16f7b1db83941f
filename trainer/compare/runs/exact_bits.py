"""The bits of a run: hashes of its curve and of its dumps, and the first place where two runs differ."""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from trainer.metrics import METRICS_FILE, ROLLOUTS_FILE
from trainer.reports.dump_files import GRADIENTS, WEIGHTS, open_dump

CURVES = {"loss": "losses", "grad_norm": "gradient norms", "lr": "learning rates"}
OF_SAMPLES = ("prompt_ids", "response_ids", "log_probs", "score")


@dataclass(frozen=True)
class Bits:
    """The curve of a run by step, a hash of each tensor of its dumps by file, and a hash of the samples of each rollout."""

    folder: Path
    rows: dict[int, dict[str, float]]
    tensors: dict[str, dict[str, str]]
    samples: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.rows)

    def of_curve(self, key: str) -> str:
        """The hash of all values of a curve, 10 hex digits."""
        return _hash(json.dumps([row[key] for _, row in sorted(self.rows.items())]).encode())[:10]

    def of_dump(self, file: str) -> str:
        """The hash of all tensors of a dump, 10 hex digits. Without the dump, a dash."""
        return _hash(json.dumps(sorted(self.tensors[file].items())).encode())[:10] if file in self.tensors else "-"

    def shown(self) -> list[str]:
        """The hashes that a table shows: losses, gradient norms, gradients of step 1, final weights; and samples, if any."""
        hashes = [self.of_curve("loss"), self.of_curve("grad_norm"), self.of_dump(GRADIENTS), self.of_dump(WEIGHTS)]
        return hashes + [_hash(json.dumps(sorted(self.samples.items())).encode())[:10]] * bool(self.samples)


def bits_of(run_folder: str | Path) -> Bits:
    """Read the bits of a run that wrote --parity_dump into its folder `parity`. Of a step that was repeated, the last
    one counts. A run that was resumed has no gradients of step 1."""
    folder = Path(run_folder)
    found = (json.loads(text) for text in (folder / METRICS_FILE).read_text().splitlines())
    rows = {row["step"]: {key: row[key] for key in CURVES} for row in found if "loss" in row}
    files = [file for file in (GRADIENTS, WEIGHTS) if (folder / "parity" / file).exists()]
    tensors = {file: _hashes(folder / "parity" / file) for file in files}
    return Bits(folder, rows, tensors, _samples(folder / ROLLOUTS_FILE))


def _samples(path: Path) -> dict[int, str]:
    """By rollout, a hash of what was sampled: tokens, their log-probs, scores. A run without rollouts has none."""
    samples = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {
        rollout: _hash(json.dumps([[sample[key] for key in OF_SAMPLES] for sample in group]).encode())
        for rollout, group in groupby(samples, lambda sample: sample["rollout"])
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hashes(path: Path) -> dict[str, str]:
    with open_dump(path) as dump:
        return {name: _hash(dump.get_tensor(name).numpy().tobytes()) for name in sorted(dump.keys())}


def first_difference(expected: Bits, found: Bits) -> str | None:
    """One line on the first place where `found` differs, or None. Of dumps, only what both runs have is compared.

    Gradients of step 1 come first, since they name the parameter. Then come samples, the curves, and the final weights.
    """
    for file in (GRADIENTS, WEIGHTS):
        names = [*expected.tensors.get(file, {})] if file in found.tensors else []
        if file == WEIGHTS and (line := _of_samples(expected, found) or _of_curves(expected, found)):
            return line
        for name in names:
            if expected.tensors[file][name] != found.tensors[file].get(name):
                return _of_tensor(expected.folder / "parity" / file, found.folder / "parity" / file, name)
    return None


def _of_samples(expected: Bits, found: Bits) -> str | None:
    numbers = expected.samples.keys() | found.samples.keys()
    apart = [number for number in numbers if expected.samples.get(number) != found.samples.get(number)]
    return f"samples differ first in rollout {min(apart)}" if apart else None


def _of_curves(expected: Bits, found: Bits) -> str | None:
    for step, row in sorted(found.rows.items()):
        for key, noun in CURVES.items():
            other = expected.rows.get(step, {}).get(key)
            if row[key] != other:
                return f"{noun} differ first at step {step}: {other!r} and {row[key]!r}"
    missing = expected.rows.keys() - found.rows.keys()
    return f"step {min(missing)} is missing" if missing else None


def _of_tensor(reference: Path, other: Path, name: str) -> str:
    with open_dump(reference) as a, open_dump(other) as b:
        if name not in set(b.keys()):
            return f"{other.name}: {name} is missing"
        x, y = a.get_tensor(name), b.get_tensor(name)
    if x.shape != y.shape:
        return f"{other.name}: {name} has shape {tuple(y.shape)}, not {tuple(x.shape)}"
    apart = x != y
    place = tuple(apart.nonzero()[0].tolist()) if apart.any() else "a sign of zero"
    ulps = (x.contiguous().view(torch.int32).long() - y.contiguous().view(torch.int32).long()).abs().max().item()
    return f"{other.name}: {name} differs in {int(apart.sum())} of {apart.numel()} elements, first at {place}, by up to {ulps} ulp"

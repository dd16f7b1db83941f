"""Find where two runs of --exact part: the sample, the rank, the parameter and the element. No difference is allowed.

Each folder has the samples of --parity_trace, and may have the dumps of --parity_dump and metrics.jsonl.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from trainer.compare.runs.exact_bits import bits_of, first_difference
from trainer.errors import UserError
from trainer.exact.exact_sums import GRADIENT_GRID, power_of_two_above
from trainer.exact.sample_sums import change_between
from trainer.metrics import METRICS_FILE, counted
from trainer.runs.features.sample_trace import SAMPLES


@dataclass(frozen=True)
class Parting:
    """Where one sample parts: its loss, or the gradient of a parameter."""

    sample: str
    tokens: int
    ranks: tuple[int, int]  # of each run, the one that had the sample
    where: str  # "loss", or the name of a parameter
    change: str


def samples_file(folder: str | Path) -> Path | None:
    """The samples of a run of --exact with --parity_trace. None if there are none."""
    return next((at for at in (Path(folder) / "parity" / SAMPLES, Path(folder) / SAMPLES) if at.is_file()), None)


def locate_samples(names: list[str], folders: list[str | Path]) -> tuple[bool, str, dict]:
    """(whether all bits are equal, the report, the same for JSON)."""
    files = [samples_file(folder) for folder in folders]
    for folder, file in zip(folders, files):
        if file is None:
            raise UserError(str(folder), f"holds no {SAMPLES}, and the other run does", "two runs of --exact")
    a, b = map(_read, files)
    lost = [sample for sample in a["samples"] if sample["sample"] not in _ids(b)]
    extra = [sample for sample in b["samples"] if sample["sample"] not in _ids(a)]
    partings = _partings(a, b)
    bits = [Path(folder) for folder in folders]
    later = first_difference(*map(bits_of, bits)) if all((f / METRICS_FILE).is_file() for f in bits) else None
    facts = {"a": names[0], "b": names[1], "agree": not (lost or extra or partings or later), "later": later}
    facts |= {"only_a": len(lost), "only_b": len(extra), "partings": [vars(parting) for parting in partings]}
    return facts["agree"], "\n".join(_lines(names, a, facts, partings)), facts


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise UserError(str(file), f"cannot be read: {error}", "the file as it was written") from None


def _ids(run: dict) -> set[str]:
    return {sample["sample"] for sample in run["samples"]}


def _partings(a: dict, b: dict) -> list[Parting]:
    """The first difference of each sample: its loss, then its gradients in the order of the backward pass."""
    known, found = {sample["sample"]: sample for sample in a["samples"]}, []
    targets = max(sum(sample["targets"] for sample in a["samples"]), 1)
    for other in b["samples"]:
        if (mine := known.get(other["sample"])) is None:
            continue
        facts = (other["sample"], other["tokens"], (mine["rank"], other["rank"]))
        if mine["loss"] != other["loss"]:
            found.append(Parting(*facts, "loss", f"{mine['loss']!r} and {other['loss']!r}"))
            continue
        for name in reversed([*a["shapes"]]):
            if words := _change(mine, other, name, a["shapes"][name], targets):
                found.append(Parting(*facts, name, words))
                break
    return found


def _change(mine: dict, other: dict, name: str, shape: list[int], targets: int) -> str | None:
    gradients = [sample["gradients"].get(name) for sample in (mine, other)]
    if None in gradients:
        return "a gradient in one run only" if gradients != [None, None] else None
    change = change_between(*gradients, math.prod(shape))
    if change is None:
        return None
    if change.place is None:
        return "several elements"
    place, rest = [], change.place
    for size in reversed(shape):
        rest, at = divmod(rest, size)
        place.append(at)
    size = abs(change.steps) * GRADIENT_GRID * power_of_two_above(targets)
    return f"one element, ({', '.join(map(str, reversed(place)))}), by {size:.3g}"


def _lines(names: list[str], a: dict, facts: dict, partings: list[Parting]) -> list[str]:
    lines = [
        f"a = {names[0]}",
        f"b = {names[1]}",
        "",
        f"{counted(len(a['samples']), 'sample')} in step 1, --exact: every bit counts",
    ]
    if facts["agree"]:
        return [*lines, "", "The runs have equal bits."]
    if facts["only_a"] or facts["only_b"]:
        lines += [
            f"only in a: {counted(facts['only_a'], 'sample')}",
            f"only in b: {counted(facts['only_b'], 'sample')}",
        ]
    if not partings:
        return [*lines, "", f"The samples that both have agree. Later: {facts['later'] or 'no difference'}"]
    first = partings[0]
    ranks = sorted({parting.ranks[1] for parting in partings})
    lines += ["", f"The runs first differ in {'the loss' if first.where == 'loss' else 'a gradient'} of a sample."]
    lines.append(
        f"  sample:         {first.sample}, {counted(first.tokens, 'token')}, on rank {first.ranks[0]} of a and {first.ranks[1]} of b"
    )
    lines.append(f"  where:          {first.where}: {first.change}")
    lines.append(
        f"  samples:        {len(partings)} of {len(a['samples'])}, on ranks {', '.join(map(str, ranks))} of b"
    )
    return [*lines, *([f"  then also:      {facts['later']}"] if facts["later"] else [])]

"""Two traced runs: the tokens that both have, how two of their tensors differ, and words for the places."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.datasets.batches.packing import IGNORE
from trainer.errors import UserError
from trainer.runs.features.module_trace import FACTS, TRACE

ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-9}
MODULE, TOKEN = 6.0, 8.0
OUTPUTS, GRADIENTS_OF_ALL = 1e-5, 1e-4


@dataclass
class Difference:
    """How two signatures, (n, parts) each, differ. Tokens and parts say where."""

    rel: float
    allowed: float
    ratio: float | None = None  # b is this many times a, everywhere. None if the ratio is not constant.
    tokens: torch.Tensor | None = None  # (n,) which tokens differ
    parts: list[int] = field(default_factory=list)  # which eighths of the features differ

    @property
    def found(self) -> bool:
        return not self.rel <= self.allowed or (self.tokens is not None and bool(self.tokens.any()))


@dataclass
class Finding:
    """The first place of one phase where the runs differ."""

    phase: str
    where: str  # module path, parameter, or a word
    rel: float
    allowed: float
    before: str = ""  # the last place that agrees
    ratio: float | None = None
    tokens: str = ""
    features: str = ""
    others: list[str] = field(default_factory=list)  # further places of the same phase, in order
    words: str = ""


@dataclass
class PhaseResult:
    phase: str
    num_places: int
    worst: float  # the largest rel / allowed among the places
    finding: Finding | None


class TracedRun:
    """A run folder. Raises UserError if its trace is missing or broken."""

    def __init__(self, name: str, folder: str | Path):
        self.name, self.folder = name, Path(folder)
        at = next((at for at in (self.folder / "parity", self.folder) if (at / TRACE).is_file()), None)
        if at is None:
            raise UserError(str(folder), f"holds no {TRACE}", "a run with --parity_trace")
        self.dump = at
        try:
            self.trace = safe_open(at / TRACE, framework="pt")
            self.facts = json.loads(self.trace.metadata()["facts"])
            self.tokens = dict(zip(FACTS, self.trace.get_tensor("tokens").T))
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise UserError(str(at / TRACE), f"is not a trace: {error}") from None
        self.entries = set(self.trace.keys())
        self.keys = list(zip(self.tokens["document"].tolist(), self.tokens["position"].tolist()))
        self.row, self.versions = _first_rows(self.folder / "metrics.jsonl")

    def read(self, entry: str) -> torch.Tensor:
        return self.trace.get_tensor(entry)[:-1]

    def spread(self, entry: str) -> float:
        """The largest relative difference between tp ranks that should hold the same."""
        return self.trace.get_tensor(entry)[-1, 0].item()


def _first_rows(metrics: Path) -> tuple[dict | None, dict]:
    """(row of step 1, also if it is not finite, versions of packages) of a metrics.jsonl. (None, {}) without the file."""
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        versions = next((row["versions"] or {} for row in rows if "versions" in row), {})
        return next((row for row in rows if "grad_norm" in row), None), dict(versions)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(str(metrics), f"cannot be read: {error}", "the file as it was written") from None


class Pair:
    """Two traced runs, with the tokens that both have."""

    def __init__(self, a: TracedRun, b: TracedRun):
        self.a, self.b = a, b
        place = {key: number for number, key in enumerate(b.keys)}
        both = [(number, place[key]) for number, key in enumerate(a.keys) if key in place]
        self.at_a, self.at_b = torch.tensor(both, dtype=torch.int64).view(-1, 2).T
        self.roundoff = max(ROUNDOFF[run.facts["dtype"]] for run in (a, b))
        there = set(b.facts["modules"])
        self.modules = [name for name in a.facts["modules"] if name in there]
        self.num_places = 2 * len(self.modules)

    def fact(self, run: TracedRun, name: str) -> torch.Tensor:
        return run.tokens[name][self.at_a if run is self.a else self.at_b]

    def values(self, entry: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.a.read(entry), self.b.read(entry)
        check_shapes(self.b, entry, x[:0], y[:0])
        return x[self.at_a], y[self.at_b]

    def allowed(self, num_before: int, factor: float = MODULE) -> float:
        """The relative difference that rounding explains, after this many modules; see the top of this file."""
        least = OUTPUTS if num_before <= len(self.modules) else GRADIENTS_OF_ALL
        return max(least, factor * self.roundoff * math.sqrt(1 + num_before))


def check_shapes(run: TracedRun, name: str, x: torch.Tensor, y: torch.Tensor) -> None:
    if x.shape != y.shape:
        raise UserError(str(run.folder), f"{name} has shape {tuple(y.shape)}", f"{tuple(x.shape)}")


def compare(x: torch.Tensor, y: torch.Tensor, allowed: float) -> Difference:
    """Compare two (n, parts) signatures. A value that is not finite in only one of them is an infinite difference."""
    finite_x, finite_y = (tensor.isfinite().all(1) for tensor in (x, y))
    odd = finite_x != finite_y
    both = (finite_x & finite_y)[:, None]
    x, y = x.where(both, 0.0), y.where(both, 0.0)
    difference, norm = y - x, x.norm().item()
    if odd.any():
        return Difference(math.inf, allowed, tokens=odd, parts=list(range(x.shape[1])))
    size = difference.norm().item()
    if size == 0.0:
        return Difference(0.0, allowed)
    rel = size / norm if norm else math.inf
    rms = norm / math.sqrt(len(x))
    of_tokens = difference.norm(dim=1) / rms if rms else difference.norm(dim=1) * math.inf
    tokens = of_tokens > TOKEN * allowed
    result = Difference(rel, allowed, tokens=tokens)
    if result.found:
        of_parts = difference.norm(dim=0) / x.norm(dim=0).clamp(min=1e-300)
        result.parts = (of_parts > max(allowed, 0.1 * of_parts.max().item())).nonzero().flatten().tolist()
        result.ratio = constant_ratio(x, y, allowed)
    return result


def constant_ratio(x: torch.Tensor, y: torch.Tensor, allowed: float) -> float | None:
    """The number r if y is r * x up to rounding and one percent. None if there is none."""
    x, y = x.double().flatten(), y.double().flatten()
    square = (x @ x).item()
    if not square or not y.norm():
        return 0.0 if square else None
    ratio = (x @ y).item() / square
    rest = ((y - ratio * x).norm() / y.norm()).item()
    return ratio if rest <= min(0.1, max(0.01, 2 * allowed)) else None


# --- words for places


def describe_tokens(moved: torch.Tensor, pair: Pair, alive: torch.Tensor | None = None) -> str:
    """A property that only the differing tokens have. Without one, their number."""
    count, valid = int(moved.sum()), int(alive.sum()) if alive is not None else len(moved)
    alive = torch.ones_like(moved) if alive is None else alive | moved
    if count >= 0.95 * valid:
        return "all"
    position, length = pair.fact(pair.a, "position"), pair.fact(pair.a, "length")
    candidates = [("the first of documents", position == 0), ("the last of documents", position == length - 1)]
    for run in (pair.a, pair.b):
        place = pair.fact(run, "place")
        candidates.append((f"documents after the first of a row of {run.name}", place > 0))
        for fact, words in (("sp_rank", "sp rank"), ("dp_rank", "dp rank"), ("micro_batch", "micro-batch")):
            values = pair.fact(run, fact)
            kinds = values.unique().tolist()
            candidates += [(f"{words} {kind} of {run.name}", values == kind) for kind in kinds if len(kinds) > 1]
    candidates += [("not the first of documents", position > 0), ("all", torch.ones_like(moved))]
    candidates.append(("those with a label", pair.fact(pair.a, "target") != IGNORE))
    scores = {}
    for words, these in candidates:
        these = these & alive
        both = int((these & moved).sum())
        scores[words] = 2 * both / max(1, count + int(these.sum()))
    best = max(scores, key=scores.get)
    return best if scores[best] > 0.75 else f"{count} of {valid}"


def describe_features(parts: list[int], num_parts: int, pair: Pair) -> str:
    """Which eighths of the features differ, and which tp rank holds them."""
    if num_parts == 1 or len(parts) in (0, num_parts):
        return "all" if num_parts > 1 else ""
    words = f"eighths {', '.join(str(part + 1) for part in parts)} of 8"
    for run in (pair.a, pair.b):
        tp = run.facts["sizes"]["tp"]
        owners = sorted({part * tp // num_parts for part in parts})
        if tp > 1 and len(owners) < tp:
            words += f": the part of tp rank {', '.join(map(str, owners))} of {run.name}"
    return words


def describe_shard(x: torch.Tensor, y: torch.Tensor, allowed: float, pair: Pair) -> str:
    """`dim 0: 64 to 127 of 128, the part of tp rank 1 of NAME`: where two full tensors differ, if not everywhere."""
    moved, words = (y - x).abs() > allowed * x.square().mean().sqrt().clamp(min=1e-300), []
    for dim in range(moved.ndim):
        places = moved.any(dim=tuple(other for other in range(moved.ndim) if other != dim)).nonzero().flatten()
        size = moved.shape[dim]
        if len(places) and int(places[-1] - places[0]) < size - 1:
            first, last = int(places[0]), int(places[-1])
            words.append(f"dim {dim}: {first} to {last} of {size}" + _owner(first, last, size, pair))
    return "; ".join(words)


def _owner(first: int, last: int, size: int, pair: Pair) -> str:
    """The rank that holds this part of a dimension, in the run that shards it over tp, or over dp and sp."""
    for run in (pair.a, pair.b):
        sizes = run.facts["sizes"]
        for axis, parts in (("tp", sizes["tp"]), ("dp x sp", sizes["dp"] * sizes["sp"])):
            length = -(-size // parts)
            if parts > 1 and first // length == last // length and last - first + 1 >= length // 2:
                return f", the part of {axis} rank {first // length} of {run.name}"
    return ""

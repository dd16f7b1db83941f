"""Find the first place where two runs part: data, forward pass, loss, backward pass, gradients, norm, weights.

Each run is a folder with the trace of --parity_trace, the dump of --parity_dump, and metrics.jsonl.

Rounding. u is the unit roundoff of the coarser compute dtype: 2**-24 for fp32, 2**-9 for bf16. Each module adds
relative errors of the size of u, with random signs. After n modules they have grown to u * sqrt(n). So the relative
difference of two outputs may be 6 u sqrt(1 + n), n being the number of modules before it. The backward pass counts
on. A single token may differ eight times as much, relative to the root mean square over tokens. A gradient of a weight
is a sum over tokens whose terms cancel: it may differ by 16 u sqrt(1 + n), and by 4 u of the norm of all gradients.
What the project allows in fp32 is always allowed: 1e-5 for outputs and losses, 1e-4 for gradients.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.compare.dumps import GRADIENTS, WEIGHTS, global_norm
from trainer.compare.locate_patterns import explain
from trainer.datasets.packing import IGNORE
from trainer.errors import UserError
from trainer.training.module_trace import FACTS, TRACE

ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-9}
MODULE, TOKEN, GRADIENT, GRADIENT_FLOOR = 6.0, 8.0, 16.0, 4.0
OUTPUTS, GRADIENTS_OF_ALL = 1e-5, 1e-4
ADAM_EPS = 1e-8  # of create_optimizer


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
    """The first place of one phase where the runs part."""

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
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise UserError(str(at / TRACE), f"is not a trace: {error}") from None
        self.entries = set(self.trace.keys())
        self.tokens = dict(zip(FACTS, self.trace.get_tensor("tokens").T))
        self.keys = list(zip(self.tokens["document"].tolist(), self.tokens["position"].tolist()))
        self.row = _first_row(self.folder / "metrics.jsonl")

    def read(self, entry: str) -> torch.Tensor:
        return self.trace.get_tensor(entry)[:-1]

    def spread(self, entry: str) -> float:
        """The largest relative difference between tp ranks that should hold the same."""
        return self.trace.get_tensor(entry)[-1, 0].item()


def _first_row(metrics: Path) -> dict | None:
    """The row of step 1 of a metrics.jsonl, also if it is not finite. None if there is no such file or row."""
    lines = metrics.read_text().splitlines() if metrics.is_file() else ()
    return next((row for row in map(json.loads, lines) if "grad_norm" in row), None)


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
        return self.a.read(entry)[self.at_a], self.b.read(entry)[self.at_b]

    def allowed(self, num_before: int, factor: float = MODULE) -> float:
        """The relative difference that rounding explains, after this many modules; see the top of this file."""
        least = OUTPUTS if num_before <= len(self.modules) else GRADIENTS_OF_ALL
        return max(least, factor * self.roundoff * math.sqrt(1 + num_before))


def locate(a: TracedRun, b: TracedRun) -> list[PhaseResult]:
    """The result of each phase, in the order of a step."""
    pair = Pair(a, b)
    results = [_data(pair)]
    if len(pair.at_a):  # else the runs have no document in common, and nothing else can be compared
        results += [_forward(pair), _loss(pair), _backward(pair)]
    if len(pair.at_a) and all((run.dump / GRADIENTS).is_file() for run in (a, b)):
        results += [_gradients(pair), _gradient_norm(pair)]
        if all((run.dump / WEIGHTS).is_file() for run in (a, b)):
            results.append(_weights(pair))
    for result in results:
        if result.finding:
            result.finding.words = explain(result.finding, pair)
    return results


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


# --- phases


def _data(pair: Pair) -> PhaseResult:
    a, b = pair.a, pair.b
    lost, extra = set(a.keys) - set(b.keys), set(b.keys) - set(a.keys)
    targets = pair.fact(a, "target"), pair.fact(b, "target")
    differ = targets[0] != targets[1]
    finding = None
    if lost or extra:
        count = len(lost) + len(extra)
        finding = Finding("data", "documents", count / len(a.keys), 0.0)
        found = [f"{len(keys)} tokens only in {run.name}" for keys, run in ((lost, a), (extra, b)) if keys]
        finding.tokens = ", ".join(found)
    elif differ.any():
        finding = Finding("data", "labels", differ.double().mean().item(), 0.0, tokens=describe_tokens(differ, pair))
        masked = [((theirs == IGNORE) & differ).sum().item() for theirs in targets]
        finding.others = [f"no label in {run.name}: {count}" for run, count in zip((a, b), masked) if count]
    return PhaseResult("data", 2, math.inf if finding else 0.0, finding)


def _walk(phase: str, pair: Pair, places: list[tuple[str, str, int]]) -> PhaseResult:
    """Compare (name, entry, number of modules before it) in order. The first place that parts is the finding."""
    finding, worst, before = None, 0.0, ""
    for name, entry, num_before in places:
        x, y = pair.values(entry)
        found = compare(x, y, pair.allowed(num_before))
        tokens = found.tokens.any() if found.tokens is not None else False
        worst = max(worst, found.rel / found.allowed, 1.0 if tokens else 0.0)
        if found.found and finding is None:
            features = describe_features(found.parts, x.shape[1], pair)
            finding = Finding(phase, name, found.rel, found.allowed, before, found.ratio, features=features)
            if found.tokens is not None:
                moved = found.tokens if found.tokens.any() else torch.ones_like(found.tokens)
                alive = x.norm(dim=1) + y.norm(dim=1) > 0
                finding.tokens = describe_tokens(moved, pair, alive)
        elif found.found and len(finding.others) < 200:
            finding.others.append(name)
        elif finding is None:
            before = name
    return PhaseResult(phase, len(places), worst, finding)


def _forward(pair: Pair) -> PhaseResult:
    return _walk("forward", pair, [(name, name, number) for number, name in enumerate(pair.modules)])


def _loss(pair: Pair) -> PhaseResult:
    return _walk("loss", pair, [("loss of tokens", "loss", len(pair.modules))])


def _backward(pair: Pair) -> PhaseResult:
    places = [("factor of the loss", "scale", 0)]
    for number, name in enumerate(reversed(pair.modules)):
        entry = f"backward/{name}"
        if entry in pair.a.entries and entry in pair.b.entries:
            places.append((name, entry, len(pair.modules) + 1 + number))
    return _walk("backward", pair, places)


def _gradients(pair: Pair) -> PhaseResult:
    """Gradients of the weights, in the order in which the backward pass reaches their modules."""
    files = pair.a.dump / GRADIENTS, pair.b.dump / GRADIENTS
    total, allowed = global_norm(files[0]), pair.allowed(pair.num_places, GRADIENT)
    floor = GRADIENT_FLOOR * pair.roundoff * total
    finding, worst, before, ratios = None, 0.0, "", {}
    with safe_open(files[0], framework="pt") as a, safe_open(files[1], framework="pt") as b:
        there = set(b.keys())
        names = in_backward_order(sorted(set(a.keys()) | there), pair.modules)
        for name in names:
            x = a.get_tensor(name).double() if name in a.keys() else None  # noqa: SIM118
            y = b.get_tensor(name).double() if name in there else None
            x = torch.zeros_like(y) if x is None else x
            y = torch.zeros_like(x) if y is None else y
            if x.shape != y.shape:
                raise UserError(str(files[1]), f"{name} has shape {tuple(y.shape)}", f"{tuple(x.shape)}")
            size, norm = (y - x).norm().item(), x.norm().item()
            bound = allowed * norm + floor
            worst = max(worst, size / bound if bound and math.isfinite(size) else math.inf if size else 0.0)
            if size <= bound:
                before = before if finding else name
                continue
            ratios[name] = constant_ratio(x, y, allowed)
            rel = size / norm if norm else math.inf
            if finding is None:
                finding = Finding("gradients", name, rel, bound / norm if norm else 0.0, before, ratios[name])
            else:
                finding.others.append(name)
    if finding:
        finding.tokens = f"{len(ratios)} of {len(names)} tensors"
    return PhaseResult("gradients", len(names), worst, finding)


def in_backward_order(names: list[str], modules: list[str]) -> list[str]:
    """Parameters by the place of their module in the backward pass. A container counts where it ends."""
    place = {name: number for number, name in enumerate(modules)}
    return sorted(names, key=lambda name: (-place.get(name.rpartition(".")[0], -1), name))


def _gradient_norm(pair: Pair) -> PhaseResult:
    """The norm that a run reports, as a multiple of the norm of the gradients that it dumped."""
    ratios, allowed = [], 1e-4 if pair.roundoff <= ROUNDOFF["fp32"] else 4 * pair.roundoff
    for run in (pair.a, pair.b):
        norm = global_norm(run.dump / GRADIENTS)
        ratios.append(run.row["grad_norm"] / norm if run.row and norm else 1.0)
    rel = abs(ratios[1] / ratios[0] - 1) if math.isfinite(sum(ratios)) and ratios[0] else math.inf
    finding = None
    if not rel <= allowed:
        finding = Finding("gradient norm", "gradient norm", rel, allowed, ratio=ratios[1] / ratios[0])
        told = (f"{run.name} reports {x:.4g} times its own" for run, x in zip((pair.a, pair.b), ratios))
        finding.tokens = ", ".join(told)
    return PhaseResult("gradient norm", 1, rel / allowed, finding)


def _weights(pair: Pair) -> PhaseResult:
    """What the gradients do not explain of the difference of weights, as a share of a full step of Adam.

    Adam's first step is lr * g / (|g| + eps), g being the clipped gradient. Other optimizers are judged by the relative
    difference of the weights.
    """
    runs = (pair.a, pair.b)
    is_adam = all(run.row and run.facts["optim"] == "adamw" for run in runs)
    lr = max(run.row["lr"] for run in runs) if is_adam else 0.0
    allowed = 2e-3 if is_adam and lr else max(1e-4, 4 * pair.roundoff)
    finding, worst, before, others = None, 0.0, "", []
    opened = [safe_open(run.dump / name, framework="pt") for run in runs for name in (WEIGHTS, GRADIENTS)]
    names = sorted(set(opened[0].keys()) & set(opened[2].keys()))
    for name in in_backward_order(names, pair.modules)[::-1]:
        weights = [opened[number].get_tensor(name).double() for number in (0, 2)]
        rest, unit = weights[1] - weights[0], weights[0].norm().item()
        if is_adam and lr:
            steps = [_adam_step(run, opened[number], name) for run, number in zip(runs, (1, 3))]
            if all(step is not None for step in steps):
                rest = rest + steps[1] - steps[0]
                unit = lr * math.sqrt(rest.numel())
        rounding = 8 * ROUNDOFF["fp32"] * weights[0].norm().item()
        size = max(0.0, rest.norm().item() - rounding) if rest.isfinite().all() else math.inf
        rel = size / unit if unit else 0.0 if not size else math.inf
        worst = max(worst, rel / allowed)
        if rel <= allowed:
            before = before if finding else name
        elif finding is None:
            finding = Finding("weights", name, rel, allowed, before)
        else:
            others.append(name)
    if finding:
        finding.others, finding.tokens = others, f"{len(others) + 1} of {len(names)} tensors"
    return PhaseResult("weights", len(names), worst, finding)


def _adam_step(run: TracedRun, gradients, name: str) -> torch.Tensor | None:
    if name not in gradients.keys():  # noqa: SIM118
        return None
    limit, norm = run.facts["max_norm"] or math.inf, run.row["grad_norm"]
    gradient = gradients.get_tensor(name).double() * min(1.0, limit / (norm + 1e-6))
    return run.row["lr"] * gradient / (gradient.abs() + ADAM_EPS)


# --- words for places


def describe_tokens(moved: torch.Tensor, pair: Pair, alive: torch.Tensor | None = None) -> str:
    """The property that tells the tokens that differ from the others, if there is one."""
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
    """Which eighths of the features differ, and whose parts over tp these are."""
    if num_parts == 1 or len(parts) in (0, num_parts):
        return "all" if num_parts > 1 else ""
    words = f"eighths {', '.join(str(part + 1) for part in parts)} of 8"
    for run in (pair.a, pair.b):
        tp = run.facts["sizes"]["tp"]
        owners = sorted({part * tp // num_parts for part in parts})
        if tp > 1 and len(owners) < tp:
            words += f": the part of tp rank {', '.join(map(str, owners))} of {run.name}"
    return words


def as_dict(results: list[PhaseResult]) -> list[dict]:
    return [asdict(result) for result in results]

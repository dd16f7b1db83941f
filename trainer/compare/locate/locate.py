"""Find the first place where two runs differ: data, forward pass, loss, backward pass, gradients, norm, weights.

Each run is a folder with the trace of --parity_trace, the dump of --parity_dump, and metrics.jsonl.

Rounding. u is the unit roundoff of the coarser compute dtype: 2**-24 for fp32, 2**-9 for bf16. Each module adds
relative errors of the size of u, with random signs. After n modules they have grown to u * sqrt(n). So the relative
difference of two outputs may be 6 u sqrt(1 + n), where n modules come before the output. The backward pass continues
the count. A single token may differ eight times as much, relative to the root mean square over tokens. A gradient of a
weight is a sum over tokens whose terms cancel: it may differ by 16 u sqrt(1 + n), and by 4 u of the norm of all
gradients. The limits of the project in fp32 are always allowed: 1e-5 for outputs and losses, 1e-4 for gradients.
"""

import math
from dataclasses import asdict

import torch

from trainer.compare.locate import locate_update as update
from trainer.compare.locate.locate_patterns import explain
from trainer.compare.locate.traced_pair import (
    Finding,
    Pair,
    PhaseResult,
    TracedRun,
    compare,
    describe_features,
    describe_tokens,
)
from trainer.datasets.batches.packing import IGNORE
from trainer.metrics import counted
from trainer.reports.dump_files import GRADIENTS, WEIGHTS


def locate(a: TracedRun, b: TracedRun) -> list[PhaseResult]:
    """The result of each phase, in the order of a step."""
    pair = Pair(a, b)
    results = [_data(pair)]
    if len(pair.at_a):  # else the runs have no document in common, and nothing else can be compared
        results += [_forward(pair), _loss(pair), _backward(pair)]
    if len(pair.at_a) and all((run.dump / GRADIENTS).is_file() for run in (a, b)):
        results += [update.gradients(pair), update.gradient_norm(pair), update.optimizer_state(pair)]
        if all((run.dump / WEIGHTS).is_file() for run in (a, b)):
            results.append(update.weights(pair))
    results = [result for result in results if result]
    for result in results:
        if result.finding:
            result.finding.words = explain(result.finding, pair)
    return results


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
        found = [f"{counted(len(keys), 'token')} only in {run.name}" for keys, run in ((lost, a), (extra, b)) if keys]
        finding.tokens = ", ".join(found)
    elif differ.any():
        finding = Finding("data", "labels", differ.double().mean().item(), 0.0, tokens=describe_tokens(differ, pair))
        masked = [((theirs == IGNORE) & differ).sum().item() for theirs in targets]
        finding.others = [f"no label in {run.name}: {count}" for run, count in zip((a, b), masked) if count]
    return PhaseResult("data", 2, math.inf if finding else 0.0, finding)


def _walk(phase: str, pair: Pair, places: list[tuple[str, str, int]]) -> PhaseResult:
    """Compare (name, entry, number of modules before it) in order. The first place that differs is the finding."""
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


def as_dict(results: list[PhaseResult]) -> list[dict]:
    return [asdict(result) for result in results]

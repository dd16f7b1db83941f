"""What a difference between two runs usually means: a table of patterns, each with a guess in words."""

import re
from collections.abc import Callable
from dataclasses import dataclass

HEAD_NORMS = re.compile(r"\.(q_norm|k_norm|q_layernorm|k_layernorm|query_norm|key_norm)\b")
AFTER_ATTENTION = re.compile(r"\.(o_proj|out_proj|c_proj|dense|self_attn|attention|attn)$")
INTO_ATTENTION = re.compile(r"\.(q_proj|k_proj|v_proj|q_norm|k_norm|qkv_proj|c_attn|query_key_value)$")
NORM = re.compile(r"norm\d*$|\.ln_\w+$")
ROWWISE = re.compile(r"\.(o_proj|down_proj|out_proj|c_proj|fc2|w2|dense_4h_to_h)$")
EMBEDDING = re.compile(r"(embed_tokens|wte|embed_in|lm_head|embed_out|embeddings?)(\.weight)?$")


@dataclass(frozen=True)
class Pattern:
    name: str
    phases: tuple[str, ...]
    matches: Callable  # (finding, pair) -> bool
    guess: str


def explain(finding, pair) -> str:
    """The guess of the first pattern in TABLE that matches. `{between}` is the module with the first difference."""
    words = next(p.guess for p in TABLE if finding.phase in p.phases and p.matches(finding, pair))
    return words.format(between=between(finding), ratio=_ratio_words(finding.ratio, pair))


def between(finding) -> str:
    """The smallest module around the last place that agrees and the first one that does not."""
    paths = [name.split(".") for name in (finding.before, finding.where) if "." in name]
    common = [parts[0] for parts in zip(*paths) if len(set(parts)) == 1]
    return ".".join(common) or "the model"


def _sizes(pair) -> dict[str, int]:
    """Numbers that a wrong factor may be, by their meaning. The larger of both runs counts."""
    sizes = {axis: max(run.facts["sizes"][axis] for run in (pair.a, pair.b)) for axis in ("sp", "tp", "dp")}
    sizes["dp x sp"] = sizes["dp"] * sizes["sp"]
    sizes["micro-batches of a step"] = max(run.facts["num_micro_batches"] for run in (pair.a, pair.b))
    return {name: size for name, size in sizes.items() if size > 1}


def _ratio_words(ratio: float | None, pair) -> str:
    """`twice as large, the number of ranks over sp`"""
    if ratio is None:
        return ""
    sizes = _sizes(pair)
    for value, words in ((ratio, "times as large"), (1 / ratio if ratio else 0.0, "times as small")):
        names = [name for name, size in sizes.items() if abs(value / size - 1) < 0.02]
        if names:
            return f"{round(value)} {words} in {pair.b.name}: the size of {' or of '.join(names)}"
    return f"{ratio:.4g} times as large in {pair.b.name}"


def _is_size(finding, pair) -> bool:
    """Whether the ratio is a number of ranks or of micro-batches, or one over it."""
    ratio = finding.ratio
    return bool(ratio) and any(abs(x / n - 1) < 0.02 for n in _sizes(pair).values() for x in (ratio, 1 / ratio))


def _split(pair, axis: str) -> bool:
    return any(run.facts["sizes"][axis] > 1 for run in (pair.a, pair.b))


def _ranks_disagree(finding, pair) -> bool:
    """Whether tp ranks that should hold the same output hold different ones."""
    entry = finding.where if finding.phase == "forward" else f"backward/{finding.where}"
    return any(
        entry in run.entries and run.spread(entry) > finding.allowed for run in (pair.a, pair.b) if run.facts["sizes"]
    )


def _only(pattern: re.Pattern) -> Callable:
    def matches(finding, pair) -> bool:
        return all(pattern.search(name) for name in (finding.where, *finding.others))

    return matches


def _at(pattern: re.Pattern, condition: Callable = lambda finding, pair: True) -> Callable:
    return lambda finding, pair: bool(pattern.search(finding.where)) and condition(finding, pair)


def _later_documents(finding, pair) -> bool:
    return finding.tokens.startswith("documents after the first")


def _all_gradients(finding, pair) -> bool:
    found, _, total = finding.tokens.partition(" of ")
    return int(found) >= 0.9 * int(total.split()[0])


def _few_tokens_of_experts(finding, pair) -> bool:
    count = re.fullmatch(r"(\d+) of (\d+)", finding.tokens)
    few = bool(count) and int(count[1]) <= 0.2 * int(count[2])
    return few and pair.roundoff > 1e-6 and bool(re.search("expert|router|gate", f"{finding.where} {finding.before}"))


F, B, G = ("forward",), ("backward",), ("gradients",)
TABLE = (
    Pattern("documents", ("data",), lambda f, p: f.where == "documents",
            "The runs saw other data: samples lost, cut or repeated, or another order, seed or batch size."),
    Pattern("labels", ("data",), lambda f, p: True,
            "The runs train other tokens: a loss mask or a shift of the labels."),
    Pattern("positions", F, _at(re.compile("rotary|position|wpe")),
            "Positions or their frequencies. Look at position_ids of packed or split rows, and at rope parameters."),
    Pattern("other experts", ("forward", "backward"), _few_tokens_of_experts,
            "A few tokens chose other experts. Rounding of the router's scores can do that: compare these runs in fp32."),
    Pattern("documents see each other", F, lambda f, p: _later_documents(f, p) and INTO_ATTENTION.search(f.before or ""),
            "Packed documents attend to each other, or the bounds of documents are wrong. Look at cu_seqlens."),
    Pattern("missing all-reduce", F, lambda f, p: _ranks_disagree(f, p),
            "The tp ranks disagree about an output that all of them should hold: a missing all-reduce over tp."),
    Pattern("summed bias or output", F, lambda f, p: bool(ROWWISE.search(f.where)) and _split(p, "tp") and _is_size(f, p),
            "The output over tp is {ratio}. It was added up or divided once too often."),
    Pattern("embedding", F, _at(EMBEDDING),
            "The embedding or the head: its weights, their tie, or the part of the vocabulary of a tp rank."),
    Pattern("attention over sp", F, _at(AFTER_ATTENTION, lambda f, p: _split(p, "sp")),
            "Attention over sp in {between}: the merge of ring blocks, the order of the parts, or the causal mask."),
    Pattern("attention", F, _at(AFTER_ATTENTION, lambda f, p: bool(INTO_ATTENTION.search(f.before or ""))),
            "Attention in {between}: kernel, mask, scale, window or soft cap. Its inputs agree."),
    Pattern("part of a tp rank", F, lambda f, p: "part of tp rank" in f.features,
            "Only the features of one tp rank: its part of the weight was sharded or loaded wrongly."),
    Pattern("norm", F, _at(NORM), "This norm: its weight, epsilon or dtype. Its input agrees."),
    Pattern("scale", F, lambda f, p: f.ratio is not None, "A scale: the output is {ratio}. Its input agrees."),
    Pattern("weights", F, lambda f, p: True,
            "This module gives another output from the same input: its weights, dtype or kernel."),
    Pattern("loss", ("loss",), lambda f, p: True,
            "The logits agree, and the losses do not: the cross-entropy, its dtype, temperature, labels or chunks."),
    Pattern("one divisor for all", B, lambda f, p: f.where.startswith("factor") and f.ratio is not None,
            "The loss is divided by another number: its gradient is {ratio}."),
    Pattern("mean of means", B, lambda f, p: f.where.startswith("factor"),
            "Micro-batches or ranks divide by their own number of targets: a mean of means."),
    Pattern("missing all-reduce", B, lambda f, p: _ranks_disagree(f, p),
            "The tp ranks disagree about a gradient that all of them should hold: a missing all-reduce over tp."),
    Pattern("counted twice", B, lambda f, p: _is_size(f, p),
            "The backward pass of {between}: the gradient is {ratio}. Sums over that axis count double, or are missing."),
    Pattern("attention over sp", B, lambda f, p: bool(INTO_ATTENTION.search(f.where)) and _split(p, "sp"),
            "The backward pass of attention over sp in {between}: gradients of keys and values that travel the ring."),
    Pattern("scale", B, lambda f, p: f.ratio is not None,
            "The backward pass of {between}: a scale, the gradient is {ratio}."),
    Pattern("backward", B, lambda f, p: True,
            "The backward pass of {between}. The gradient that enters it agrees."),
    Pattern("norms of heads", G, lambda f, p: _only(HEAD_NORMS)(f, p) and _split(p, "tp"),
            "Only norms of heads: a missing all-reduce over tp. Each rank saw only its own heads."),
    Pattern("no gradient", G, lambda f, p: f.rel >= 0.999 and f.ratio == 0.0,
            "No gradient arrives in one run: frozen, detached, or left out of the reduction."),
    Pattern("all scaled", G, lambda f, p: _all_gradients(f, p) and _is_size(f, p),
            "All gradients are {ratio}: a sum instead of a mean over ranks, or the reverse."),
    Pattern("all", G, lambda f, p: _all_gradients(f, p),
            "All gradients, while the gradients of the outputs agree: the reduction over ranks or micro-batches."),
    Pattern("tied", G, _only(EMBEDDING), "Only embedding and head: a broken tie, or a reduction that leaves one out."),
    Pattern("some scaled", G, lambda f, p: _is_size(f, p),
            "The gradient of these weights is {ratio}: a reduction over that axis is missing or done twice."),
    Pattern("norms", G, _only(re.compile(r"norm|\.ln_")), "Only norms: a missing sum over the ranks that share the sequence."),
    Pattern("gradient of a weight", G, lambda f, p: True,
            "The gradient of this weight, while the gradient of its module's output agrees: its reduction, dtype or accumulation."),
    Pattern("norm of gradients", ("gradient norm",), lambda f, p: True,
            "The gradients agree, and their reported norm does not: replicas counted once per rank, or a missing sum "
            "over an axis."),
    Pattern("moments", ("optimizer state",), lambda f, p: True,
            "The gradients agree, and the optimizer's state does not: its betas, clipping, dtype of the moments, or a tensor "
            "outside of the optimizer."),
    Pattern("optimizer", ("weights",), lambda f, p: True,
            "The gradients agree, and the step does not: masters that are not fp32, eps, clipping, the learning rate, "
            "weight decay, or a tensor outside of the optimizer."),
)  # fmt: skip

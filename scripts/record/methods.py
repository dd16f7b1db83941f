"""DPO, reward models and GRPO: the conditions, their inputs, and the plain loop of each, one sequence at a time.

DPO is Rafailov et al. 2023, equation 7; the reward model is Ouyang et al. 2022, equation 1. GRPO is the policy gradient
with the mean over all tokens of a step, and a score less the mean of its group, without a clip: one update to a rollout.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import EPOCHS, read_jsonl, steps_of, trained, weights_of, write_jsonl
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trainer.compare.other_trainers.plain_reference import MISTAKES

PAIRS, GROUP, TOP_K, BETA = 11, 4, 150, 0.1
FULL_STEP = 4  # micro-batches of a full step, over all ranks
METHODS = {
    "DPO, accumulation 4": {"method": "dpo", "batch": 2, "accumulation": 4, "rows": 8},
    "DPO, last short batch": {"method": "dpo", "batch": 2, "accumulation": 4, "rows": PAIRS, "in_order": True},
    "DPO, 2 ranks": {"method": "dpo", "batch": 2, "accumulation": 2, "rows": 8, "ranks": 2},
    "reward model, accumulation 4": {"method": "rm", "batch": 2, "accumulation": 4, "rows": 8},
    "reward model, last short batch": {"method": "rm", "batch": 2, "accumulation": 4, "rows": PAIRS, "in_order": True},
    "reward model, tensor parallelism 2": {"method": "rm", "batch": 8, "accumulation": 1, "rows": 8, "ranks": 2, "tp": 2},
    "GRPO, accumulation 4": {"method": "grpo", "batch": 2, "accumulation": 4, "rows": 8},
    "GRPO, top-k sampling": {"method": "grpo", "batch": 2, "accumulation": 4, "rows": 8, "top_k": TOP_K},
    "GRPO, top-k sampling, log-probs of the engine": {
        "method": "grpo", "batch": 2, "accumulation": 4, "rows": 8, "top_k": TOP_K, "engine_log_probs": True,
    },
}  # fmt: skip


def make(folder: Path) -> None:
    """Writes FOLDER/reward_model, pairs{,_text,_tokens}.jsonl and rollouts{,_top_k}.jsonl, from FOLDER/model."""
    tokenizer, pairs = AutoTokenizer.from_pretrained(folder / "model"), []
    generator = torch.Generator().manual_seed(3)
    for number in range(PAIRS):
        digits = torch.randint(10, (2 + 3 * (number % 5),), generator=generator).tolist()
        better, worse = sorted(digits), [*digits[: 2 + number % 3], 0]
        texts = [" ".join(map(str, part)) for part in (better, worse)]
        prompt = [{"role": "user", "content": f"Sort these digits: {' '.join(map(str, digits))}"}]
        pairs.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1] + " and so on" * (number % 2)})
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    texts = [{**pair, "prompt": render(pair["prompt"])} for pair in pairs]
    whole = [{**p, **{s: [{"role": "assistant", "content": p[s]}] for s in ("chosen", "rejected")}} for p in pairs]
    answers = {
        side: [tokenizer(row[side])["input_ids"] + [tokenizer.eos_token_id] for row in texts]
        for side in ("chosen", "rejected")
    }
    tokens = [
        {"prompt_ids": tokenizer(row["prompt"])["input_ids"], "chosen_ids": answers["chosen"][i], "rejected_ids": answers["rejected"][i]}
        for i, row in enumerate(texts)
    ]  # fmt: skip
    for name, rows in {"pairs": whole, "pairs_text": texts, "pairs_tokens": tokens}.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(folder / "reward_model")
    tokenizer.save_pretrained(folder / "reward_model")
    write_jsonl(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in texts[:8]])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    for name, top_k in (("rollouts", 0), ("rollouts_top_k", TOP_K)):
        write_jsonl(folder / f"{name}.jsonl", list(sampled(model, [row["prompt_ids"] for row in tokens], top_k)))


@torch.no_grad()
def sampled(model: torch.nn.Module, prompts: list[list[int]], top_k: int) -> Iterator[dict]:
    """EPOCHS rollouts of two prompts with GROUP responses each, of uneven lengths, as rows of rollouts.jsonl."""
    generator = torch.Generator().manual_seed(4)
    for place in range(EPOCHS * 2 * GROUP):
        rollout, number = divmod(place, 2 * GROUP)
        row = (2 * rollout + number // GROUP) % len(prompts)
        ids, log_probs, kept_ids = list(prompts[row]), [], []
        for _ in range(3 + 5 * (number % 3)):
            logits = model(torch.tensor([ids])).logits[0, -1]
            kept = logits.topk(top_k or len(logits)).indices.sort().values
            choice = torch.multinomial(logits[kept].softmax(-1), 1, generator=generator)
            ids.append(kept[choice].item())
            log_probs.append(logits[kept].log_softmax(-1)[choice].item())
            kept_ids.append(kept.tolist())
        score = float(torch.randint(6, (), generator=generator))
        yield {
            "rollout": rollout, "number": number, "row": row, "prompt_ids": prompts[row], "response_ids": ids[len(prompts[row]) :],
            "log_probs": log_probs, "finished": True, "label": None, "score": score, "metrics": {}, **({"kept_ids": kept_ids} if top_k else {}),
        }  # fmt: skip


def answer_log_probs(
    model: torch.nn.Module, prompt: list[int], answer: list[int], kept: list | None = None
) -> torch.Tensor:
    """log p of each token of an answer, (tokens,); with `kept`, of the distribution over each token's set."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    if kept:
        cut = torch.full_like(logits, -math.inf)
        for place, ids in enumerate(kept):
            cut[place, ids] = 0.0
        logits = logits + cut
    return -F.cross_entropy(logits, torch.tensor(answer), reduction="none")


def dpo_loss(model, reference, pair: dict) -> torch.Tensor:
    """The loss of one pair."""
    margin = 0.0
    for side, sign in (("chosen_ids", 1), ("rejected_ids", -1)):
        with torch.no_grad():
            before = answer_log_probs(reference, pair["prompt_ids"], pair[side]).sum()
        margin = margin + sign * (answer_log_probs(model, pair["prompt_ids"], pair[side]).sum() - before)
    return -F.logsigmoid(BETA * margin)


def reward_loss(model, _reference, pair: dict) -> torch.Tensor:
    """The loss of one pair."""
    chosen, rejected = (
        model(input_ids=torch.tensor([pair["prompt_ids"] + pair[side]])).logits[0, 0]
        for side in ("chosen_ids", "rejected_ids")
    )
    return -F.logsigmoid(chosen - rejected)


def grpo_loss(model, _reference, sample: dict) -> torch.Tensor:
    """The sum over the tokens of one response."""
    log_probs = answer_log_probs(model, sample["prompt_ids"], sample["response_ids"], sample.get("kept_ids"))
    ratio = torch.exp(log_probs - log_probs.detach())
    if "sampled" in sample:  # old log-probs over the full vocabulary, against those of the sampler: the kept mass
        ratio = ratio * torch.exp(log_probs.detach() - torch.tensor(sample["sampled"]))
    return -(sample["advantage"] * ratio).sum()


LOSSES = {"dpo": dpo_loss, "rm": reward_loss, "grpo": grpo_loss}


@dataclass(frozen=True)
class Choice:
    """What a trainer does instead: other samples, other weights of them, or all multiplied by a number."""

    name: str
    verdict: str
    methods: tuple[str, ...]
    change: Callable[[dict], dict] | None = None
    weights: Callable[[list[list[dict]], int], list[float]] | None = None
    factor: float = 1.0


def with_line_break(pair: dict) -> dict:
    return {**pair, **{side: [*pair[side], pair["line_break"]] for side in ("chosen_ids", "rejected_ids")}}


def full_vocabulary(sample: dict) -> dict:
    return {key: value for key, value in sample.items() if key != "kept_ids"}


def kept_mass(sample: dict) -> dict:
    return {**full_vocabulary(sample), "sampled": sample["log_probs"]}


def means_over_a_full_step(micro_batches: list[list[dict]], _ranks: int) -> list[float]:
    return [1 / len(batch) / FULL_STEP for batch in micro_batches for _ in batch]


MEANS = [mistake for mistake in MISTAKES if mistake.weights]
LINE_BREAK = Choice("the line break behind the answer belongs to it", "convention", ("dpo", "rm"), with_line_break)
MEANS_OF_PAIRS = [
    *(Choice(mean.name.replace("tokens", "pairs"), "wrong", ("dpo", "rm"), weights=mean.weights) for mean in MEANS),
    Choice("the means of micro-batches, over the number of a full step", "wrong", ("dpo", "rm"), weights=means_over_a_full_step),
]  # fmt: skip
CHOICES = [
    LINE_BREAK,
    Choice("log-probs over the full vocabulary, though the sampler cut tokens off", "convention", ("grpo",), full_vocabulary),
    Choice("log-probs over the full vocabulary against those of the sampler: each token counts by the kept mass", "wrong", ("grpo",), kept_mass),
    *(Choice(mean.name, "wrong", ("grpo",), weights=mean.weights) for mean in MEANS),
    *MEANS_OF_PAIRS,
    Choice("loss and gradients are multiplied by the ranks of tensor parallelism", "wrong", ("rm",), factor=2.0),
    Choice("loss and gradients are divided by the ranks of tensor parallelism", "wrong", ("rm",), factor=0.5),
    *(replace(mean, name=f"{mean.name}; {LINE_BREAK.name}", change=with_line_break) for mean in MEANS_OF_PAIRS),
]  # fmt: skip


def read_items(inputs: Path, condition: dict) -> list[list[dict]]:
    """The samples of each step. `loss_mask` has a 1 for what the mean counts: pairs, or tokens of a response."""
    if condition["method"] != "grpo":
        line_break = AutoTokenizer.from_pretrained(inputs / "model")("\n")["input_ids"][-1]
        rows = read_jsonl(inputs / "pairs_tokens.jsonl")
        rows = [{**row, "line_break": line_break, "loss_mask": [0, 1]} for row in rows]
        return [[rows[row] for row in numbers] for numbers in steps_of(condition)]
    name = "rollouts_top_k" if condition.get("top_k") else "rollouts"
    rows = read_jsonl(inputs / f"{name}.jsonl")
    for start in range(0, len(rows), GROUP):
        mean = sum(row["score"] for row in rows[start : start + GROUP]) / GROUP
        for row in rows[start : start + GROUP]:
            row |= {"advantage": row["score"] - mean, "loss_mask": [0] + [1] * len(row["response_ids"])}
    size = condition["rows"]
    return [rows[start : start + size] for start in range(0, len(rows), size)][:EPOCHS]


def plain_method_curve(
    inputs: Path, condition: dict, choice: Choice | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[tuple[float, float]], dict, dict]:
    """((loss, gradient norm) of each step, the first weights, the final weights), as judge.plain_curve has them."""
    kind, name = (
        (AutoModelForSequenceClassification, "reward_model")
        if condition["method"] == "rm"
        else (AutoModelForCausalLM, "model")
    )
    model, reference = (kind.from_pretrained(inputs / name, dtype=dtype).train() for _ in range(2))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    choice, loss_of = choice or Choice("", "equal", ()), LOSSES[condition["method"]]

    def step(batch: list[dict]) -> tuple[float, float]:
        batch = [choice.change(item) for item in batch] if choice.change else batch
        count, total = sum(sum(item["loss_mask"]) for item in batch), 0.0
        weights = weights_of(batch, condition, choice.weights) or [1 / count] * len(batch)
        model.zero_grad()
        for item, weight in zip(batch, weights, strict=True):
            loss = loss_of(model, reference, item) * weight * choice.factor
            loss.backward()
            total += loss.item()
        return total, torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()

    curve = trained(model, read_items(inputs, condition), step)
    return curve, first, {name: p.detach() for name, p in model.named_parameters()}

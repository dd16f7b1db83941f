"""The plain loop for rows with images: transformers' model, its processor's own call, one row at a time, torch's AdamW.

It shares with the trainer only the loading of the processor, which transformers cannot load without torchvision. It
renders, tokenizes and masks on its own.
"""

import copy
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from PIL import Image
from reference import add_lora
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoTokenizer

from trainer.datasets.images.image_processor import load_processor
from trainer.models.reward import make_initial_reward_model


def inputs_of(row: dict, root: Path, processor, is_prompt=False) -> tuple[dict, torch.Tensor]:
    """(arguments of the model's call, labels at the position of their token) of one row, by the processor's own call."""
    images = [Image.open(root / name).convert("RGB") for name in row["images"] or []]
    talk = []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            pieces = [piece for piece in re.split("(<image>)", content) if piece]
            content = [{"type": "image"} if p == "<image>" else {"type": "text", "text": p} for p in pieces]
        talk.append({"role": message["role"], "content": content})
    text = processor.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=is_prompt)
    options = {"images": [images]} if images else {}
    inputs = processor(text=[text], return_tensors="pt", **options)
    inputs.pop("attention_mask")
    if is_prompt:
        return dict(inputs), torch.tensor([])
    ids = inputs["input_ids"][0].tolist()
    start = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(ids), 0, -1) if ids[i - len(start) : i] == start)
    end = max(i for i, token in enumerate(ids) if token == processor.tokenizer.eos_token_id) + 1
    labels = torch.full((len(ids),), -100)
    labels[first:end] = inputs["input_ids"][0, first:end]
    return dict(inputs), labels


def sides_of(pair: dict) -> list[dict]:
    """The two conversations of a pair."""
    return [with_answer(pair, pair[side]) for side in ("chosen", "rejected")]


def with_answer(pair: dict, answer: str) -> dict:
    return {"messages": [*pair["prompt"], {"role": "assistant", "content": answer}], "images": pair["images"]}


def answer_log_prob(model, inputs: dict, labels: torch.Tensor) -> torch.Tensor:
    log_probs = model(**inputs, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return sum(log_probs[t, token] for t, token in enumerate(labels[1:]) if token != -100)


def log_ratio(model, reference, sample) -> torch.Tensor:
    with torch.no_grad():
        fixed = answer_log_prob(reference, *sample)
    return answer_log_prob(model, *sample) - fixed


def sft_losses(model, reference, rows: list[dict], read):
    samples = [read(row) for row in rows]
    count = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
    for inputs, labels in samples:
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        yield F.cross_entropy(logits, labels[1:], reduction="sum") / count


def dpo_losses(model, reference, rows: list[dict], read, beta=0.1):
    """Rafailov et al. 2023, equation 7."""
    for row in rows:
        chosen, rejected = (log_ratio(model, reference, read(side)) for side in sides_of(row))
        yield -torch.log(torch.sigmoid(beta * chosen - beta * rejected)) / len(rows)


def kto_losses(model, reference, rows: list[dict], read, beta=0.1):
    """Ethayarajh et al. 2024, section 4.1, with all lambdas 1."""
    answers = [(row, row[side], side == "chosen") for row in rows for side in ("chosen", "rejected")]
    with torch.no_grad():
        others = [
            log_ratio(model, reference, read(with_answer(row, answers[n - 1][1])))
            for n, (row, *_) in enumerate(answers)
        ]
    z_0 = max(0.0, (sum(others) / len(others)).item())
    for row, answer, is_good in answers:
        ratio = log_ratio(model, reference, read(with_answer(row, answer)))
        value = torch.sigmoid(beta * (ratio - z_0) if is_good else beta * (z_0 - ratio))
        yield (1 - value) / len(answers)


def rm_losses(model, reference, rows: list[dict], read):
    """Scores by transformers' own forward of one row without padding."""
    for row in rows:
        chosen, rejected = (model(**read(side)[0]).logits[0, 0].double() for side in sides_of(row))
        yield -torch.log(torch.sigmoid(chosen - rejected)) / len(rows)


def grpo_losses(model, reference, rows: list[dict], read):
    """Dr. GRPO (Liu et al. 2025) on samples of rollouts.jsonl, two of each prompt: the policy that drew them is `model`."""
    scores = torch.tensor([row["score"] for row in rows], dtype=torch.float64).view(-1, 2)
    advantages = (scores - scores.mean(1, keepdim=True)).flatten()
    count = sum(len(row["response_ids"]) for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        log_probs = response_log_probs(model, row, read)
        yield -(advantage * torch.exp(log_probs - log_probs.detach())).sum() / count


def response_log_probs(model, row: dict, read) -> torch.Tensor:
    """Of a sample of rollouts.jsonl, whose prompt is a row of pairs.jsonl."""
    root = read.keywords["root"]
    pair = json.loads((root / "pairs.jsonl").read_text().splitlines()[row["row"]])
    inputs, _ = inputs_of({"messages": pair["prompt"], "images": pair["images"]}, **read.keywords, is_prompt=True)
    prompt = inputs["input_ids"]
    assert prompt[0].tolist() == row["prompt_ids"]
    response = torch.tensor([row["response_ids"]])
    read_again = response[:, :-1]  # the last token, which may be that of an image, is never an input
    inputs["input_ids"] = torch.cat([prompt, read_again], 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.zeros_like(read_again)], 1)
    logits = model(**inputs, use_cache=False).logits[0, prompt.shape[1] - 1 :].double()
    return logits.log_softmax(-1).gather(1, response[0][:, None]).squeeze(1)


def plain_log_probs(folder: str, rollouts: list[dict], root: Path):
    """(sample, its log-probs by a forward pass of transformers) of each sample, for the model of a folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = load_processor(folder, AutoTokenizer.from_pretrained(folder))
    read = functools.partial(inputs_of, root=root, processor=processor)
    for sample in rollouts:
        with torch.no_grad():
            yield sample, response_log_probs(model, sample, read).float()


LOSSES = {"sft": sft_losses, "dpo": dpo_losses, "kto": kto_losses, "rm": rm_losses, "grpo": grpo_losses}


def plain_run(
    folder: str,
    rows: list[dict],
    root: Path,
    *,
    lr: float,
    steps: int,
    frozen=(),
    tower=(),
    tower_lr=0.0,
    lora_rank=0,
    method="sft",
    gradients=None,
) -> dict:
    """Train on all rows at once for some steps: {"losses", "norms", "grads" of step 1, "weights" at the end}.

    Parameters whose name has one of `frozen` in it do not train. Those with one of `tower` train with `tower_lr`.
    `gradients`: the first update is made with these gradients of another run.
    """
    auto_class, source = AutoModelForImageTextToText, folder
    if method == "rm":
        auto_class, source = AutoModelForSequenceClassification, f"{folder}-initial"
        make_initial_reward_model(folder, source, seed=42)
    model = auto_class.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    reference = copy.deepcopy(model).eval() if method in ("dpo", "kto") else None
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    if lora_rank:
        args = SimpleNamespace(
            lora_rank=lora_rank, lora_alpha=None, lora_adapter=None, target_modules=None, lora_experts=False,
            use_dora=False, use_rslora=False, seed=42,
        )  # fmt: skip
        model = add_lora(model, args)
    processor = load_processor(folder, AutoTokenizer.from_pretrained(folder))
    named = {name.removeprefix("base_model.model."): parameter for name, parameter in model.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    own = {name: tower_lr for name in trained if any(part in name for part in tower)}
    groups = [{"params": [p], "lr": own.get(name, lr)} for name, p in trained.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    found = {"losses": [], "norms": []}
    for step in range(steps):
        total = 0.0
        for loss in LOSSES[method](
            model, reference, rows, functools.partial(inputs_of, root=root, processor=processor)
        ):
            loss.backward()
            total += loss.item()
        found["losses"].append(total)
        if step == 0:
            found["grads"] = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
            for name, gradient in (gradients or {}).items():
                trained[name].grad.copy_(gradient)
        found["norms"].append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    tensors = dict(model.named_buffers()) | named
    return found | {"weights": {name: tensor.detach().clone() for name, tensor in tensors.items()}}


def differences(run_folder: Path, expected: dict) -> dict[str, float]:
    """The largest differences between a run of the trainer, with --parity_dump RUN/dump, and a plain run.

    Losses and norms are relative (losses of a policy to the mean of |advantage|); gradients are relative to the largest of their tensor; weights are absolute.
    """
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert len(rows) == len(expected["losses"])
    gradients = load_file(run_folder / "dump" / "grads_step1.safetensors")
    assert set(gradients) == set(expected["grads"])
    weights = load_file(run_folder / "dump" / "weights_final.safetensors")
    # the gradient of a key's bias is 0 but for rounding, and Adam divides noise by noise
    weights = {name: weight for name, weight in weights.items() if not name.endswith("k_proj.bias")}
    return {
        "loss": max(
            abs(row["loss"] - loss) / max(abs(loss), row.get("advantage_abs", 0))
            for row, loss in zip(rows, expected["losses"], strict=True)
        ),
        "norm": max(abs(row["grad_norm"] / norm - 1) for row, norm in zip(rows, expected["norms"], strict=True)),
        "gradients": max(
            ((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-3)).item()
            for name, gradient in expected["grads"].items()
        ),
        "weights": max((weight - expected["weights"][name]).abs().max().item() for name, weight in weights.items()),
    }

"""The plain loop for rows with images: transformers' model, its processor's own call, one row at a time, torch's AdamW.

It shares with the trainer only the loading of the processor, which transformers cannot load without torchvision. It
renders, tokenizes and masks on its own.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from PIL import Image
from reference import add_lora
from transformers import AutoModelForImageTextToText, AutoTokenizer

from trainer.datasets.image_processor import load_processor


def inputs_of(row: dict, root: Path, processor) -> tuple[dict, torch.Tensor]:
    """(arguments of the model's call, labels at the position of their token) of one row, by the processor's own call."""
    images = [Image.open(root / name).convert("RGB") for name in row["images"] or []]
    talk = []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            pieces = [piece for piece in re.split("(<image>)", content) if piece]
            content = [{"type": "image"} if p == "<image>" else {"type": "text", "text": p} for p in pieces]
        talk.append({"role": message["role"], "content": content})
    text = processor.tokenizer.apply_chat_template(talk, tokenize=False)
    options = {"images": [images]} if images else {}
    inputs = processor(text=[text], return_tensors="pt", **options)
    inputs.pop("attention_mask")
    ids = inputs["input_ids"][0].tolist()
    start = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(ids), 0, -1) if ids[i - len(start) : i] == start)
    end = max(i for i, token in enumerate(ids) if token == processor.tokenizer.eos_token_id) + 1
    labels = torch.full((len(ids),), -100)
    labels[first:end] = inputs["input_ids"][0, first:end]
    return dict(inputs), labels


def plain_run(
    folder: str, rows: list[dict], root: Path, *, lr: float, steps: int, frozen=(), tower=(), tower_lr=0.0, lora_rank=0
) -> dict:
    """Train on all rows at once for some steps: {"losses", "norms", "grads" of step 1, "weights" at the end}.

    Parameters whose name has one of `frozen` in it do not train. Those with one of `tower` train with `tower_lr`.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    if lora_rank:
        args = SimpleNamespace(lora_rank=lora_rank, lora_alpha=None, target_modules=None, seed=42)
        model = add_lora(model, args)
    processor = load_processor(folder, AutoTokenizer.from_pretrained(folder))
    samples = [inputs_of(row, root, processor) for row in rows]
    count = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
    named = {name.removeprefix("base_model.model."): parameter for name, parameter in model.named_parameters()}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    own = {name: tower_lr for name in trained if any(part in name for part in tower)}
    groups = [{"params": [p], "lr": own.get(name, lr)} for name, p in trained.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    found = {"losses": [], "norms": []}
    for step in range(steps):
        total = 0.0
        for inputs, labels in samples:
            logits = model(**inputs, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, labels[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        found["losses"].append(total)
        if step == 0:
            found["grads"] = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        found["norms"].append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    tensors = dict(model.named_buffers()) | named
    return found | {"weights": {name: tensor.detach().clone() for name, tensor in tensors.items()}}

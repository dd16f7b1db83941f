"""The inputs of the record: a tiny model, rows as conversations and as token ids, an adapter, and the conditions."""

import json
from pathlib import Path

import torch

ROWS, EVAL_ROWS = 11, 21
LEARNING_RATE, EPOCHS, MAX_LENGTH = 1e-3, 4, 1024
# An epoch is one step over all rows, so the order of the rows changes no loss. "last short batch" needs the file's order.
# batch: samples of a micro-batch on one rank; accumulation: micro-batches of a step on one rank
CONDITIONS = {
    "accumulation 1": {"batch": 8, "accumulation": 1, "rows": 8},
    "accumulation 4, uneven lengths": {"batch": 2, "accumulation": 4, "rows": 8},
    "last short batch": {"batch": 2, "accumulation": 4, "rows": ROWS, "in_order": True},
    "packing": {"batch": 1, "accumulation": 1, "rows": 8, "packing": True},
    "2 ranks": {"batch": 2, "accumulation": 2, "rows": 8, "ranks": 2},
    "LoRA": {"batch": 2, "accumulation": 4, "rows": 8, "lora": True},
    "chat template with masks": {"batch": 2, "accumulation": 4, "rows": 8, "messages": True},
    "resume in the middle": {"batch": 2, "accumulation": 4, "rows": 8, "resume": True},
    "evaluation, uneven batches": {"batch": 2, "accumulation": 4, "rows": 8, "evaluation": True},
}


def steps_of(condition: dict) -> list[list[int]]:
    """The row numbers of each optimizer step, in the order of the file."""
    per_step, rows = condition["batch"] * condition["accumulation"] * condition.get("ranks", 1), condition["rows"]
    epoch = [list(range(rows))] if condition.get("packing") else None
    epoch = epoch or [list(range(start, min(start + per_step, rows))) for start in range(0, rows, per_step)]
    return epoch * EPOCHS


def weights_of(batch: list[dict], condition: dict, weights) -> list[float] | None:
    """The weight of each sample of a step, as a mistake `weights` of the mean has it; None for the right mean."""
    size = condition["batch"]
    micro_batches = [batch[start : start + size] for start in range(0, len(batch), size)]
    return weights(micro_batches, condition.get("ranks", 1)) if weights else None


def trained(model: torch.nn.Module, batches: list[list[dict]], step) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each optimizer step of the plain loop. `step(batch)` makes the gradients and gives both."""
    parameters, curve = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0)
    for batch in batches:
        curve.append(step(batch))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return curve


def conversations(number: int, seed: int) -> list[dict]:
    """Rows {"messages"} of one to four turns, of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(number):
        messages = []
        for _ in range(1 + row % 4):
            digits = torch.randint(
                10, (int(torch.randint(2, 30, (), generator=generator)),), generator=generator
            ).tolist()
            messages.append({"role": "user", "content": f"Sort these digits: {' '.join(map(str, digits))}"})
            messages.append({"role": "assistant", "content": " ".join(map(str, sorted(digits)))})
        rows.append({"messages": messages})
    return rows


def tokenized(tokenizer, rows: list[dict]) -> list[dict]:
    """{"input_ids", "attention_mask", "labels"}: by the template of the model; the assistant's turns have a loss."""
    samples = []
    for row in rows:
        found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        labels = [token if bit else -100 for token, bit in zip(ids, mask, strict=True)]
        samples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return samples


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path) -> None:
    """Writes FOLDER/model, adapter, {rows,eval}.jsonl with messages and {rows,eval}_tokens.jsonl."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.datasets.demos.demo import make_demo

    folder.mkdir(parents=True)
    make_demo(str(folder / "demo"))
    (folder / "demo/model").rename(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for name, number, seed in (("rows", ROWS, 1), ("eval", EVAL_ROWS, 2)):
        rows = conversations(number, seed)
        write_jsonl(folder / f"{name}.jsonl", rows)
        write_jsonl(folder / f"{name}_tokens.jsonl", tokenized(tokenizer, rows))
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(folder / "adapter")

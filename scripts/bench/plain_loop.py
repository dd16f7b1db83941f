"""A training loop written by hand, to compare speed: transformers, torch AdamW, padded batches, one process.

    python scripts/bench/plain_loop.py STEPS MICRO_BATCH_SIZE <the flags of train_sft>

It reads the data like train_sft. It writes one row per step to <output_dir>/metrics.jsonl, with step_time and tokens.
tokens counts the tokens of samples, without padding.
"""

import json
import math
import os
import sys
import time

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../.."))
from types import SimpleNamespace

from trainer.cli.train_sft import parse
from trainer.datasets.batches.global_batches import epoch_order
from trainer.flags.parse_flags import flat
from trainer.metrics import host_peak_memory_bytes
from trainer.runs.run_data import load_sft as load_data


def collate(samples: list[dict], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (input_ids, attention_mask, labels), each (rows, longest), padded on the right."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [[], [], []]
    for sample in samples:
        ids, mask = list(sample["input_ids"]), sample["loss_mask"]
        padding = longest - len(ids)
        rows[0].append(ids + [pad_id] * padding)
        rows[1].append([1] * len(ids) + [0] * padding)
        rows[2].append([token if keep else -100 for token, keep in zip(ids, mask)] + [-100] * padding)
    return tuple(torch.tensor(row) for row in rows)


def main(num_steps: int, micro_size: int, argv: list[str]) -> None:
    groups, _ = parse(argv)
    args = SimpleNamespace(**flat(groups))
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    samples, _ = load_data(groups, tokenizer, args.dataset, args.dataset_split, "--dataset")
    model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    if getattr(model.config, "num_experts", None):
        model.set_experts_implementation("eager")  # transformers' own loop over the experts
    decayed, others = ([p for p in model.parameters() if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=tuple(args.adam_betas))
    order = epoch_order(len(samples), args.seed, 0, shuffle=not args.no_shuffle)
    os.makedirs(args.output_dir, exist_ok=True)
    with open(f"{args.output_dir}/metrics.jsonl", "w") as log:
        for step in range(num_steps):
            started = time.perf_counter()
            batch = [samples[i] for i in order[step * args.train_batch_size : (step + 1) * args.train_batch_size]]
            num_targets = sum(sum(sample["loss_mask"][1:]) for sample in batch)
            total = torch.zeros(())
            for first in range(0, len(batch), micro_size):
                ids, mask, labels = collate(batch[first : first + micro_size], tokenizer.pad_token_id or 0)
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
                loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_targets
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            row = {"step": step + 1, "loss": total.item(), "tokens": sum(len(s["input_ids"]) for s in batch)}
            row |= {"step_time": time.perf_counter() - started, "peak_memory_bytes": host_peak_memory_bytes()}
            log.write(json.dumps(row) + "\n")
    if not args.no_save:
        model.save_pretrained(f"{args.output_dir}/model")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

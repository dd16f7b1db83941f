"""Measure what --share_prompts saves: forward and backward passes over groups, in rows of their own and in shared rows.

    python scripts/bench/share_prompts.py [--rounds 5]

A random Qwen3 of 6 layers, fp32, two prompts with eight responses each. The losses of both must agree within 1e-6.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer.datasets.batches.packing import IGNORE, collate_padded, model_inputs
from trainer.datasets.batches.shared_prompts import collate_shared
from trainer.models.attention.prompt_tree import NAME, share_prompts

LENGTHS = [(300, 20), (300, 100), (100, 100), (100, 300), (20, 10)]  # tokens of a prompt and of a response
PROMPTS, EACH, VOCAB_SIZE = 2, 8, 2048


def make_samples(prompt_len: int, response_len: int) -> list[dict]:
    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (count,)).tolist()

    prompts = [tokens(prompt_len) for _ in range(PROMPTS)]
    mask = [0] * prompt_len + [1] * response_len
    return [
        {"input_ids": prompt + tokens(response_len), "loss_mask": mask, "prompt_length": prompt_len}
        for prompt in prompts
        for _ in range(EACH)
    ]


def timed_step(model, batch: dict) -> tuple[float, float]:
    """(seconds, loss)"""
    started = time.perf_counter()
    logits = model(**model_inputs(batch)).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE)
    loss.backward()
    return time.perf_counter() - started, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads))
    share_prompts(model)
    print("| tokens of a prompt, of a response | own rows, s | shared rows, s | times as fast |\n|---|---:|---:|---:|")
    for lengths in LENGTHS:
        samples = make_samples(*lengths)
        batches = [collate(samples, pad_token_id=0) for collate in (collate_padded, collate_shared)]
        seconds: list[list[float]] = [[], []]
        for _ in range(1 + rounds):  # the first one does not count
            found = []
            for batch, attention in zip(batches, ("sdpa", NAME)):
                model.set_attn_implementation(attention)
                found.append(timed_step(model, batch))
            assert abs(found[0][1] - found[1][1]) < 1e-6 * found[0][1], found
            for own, (passed, _) in zip(seconds, found):
                own.append(passed)
        plain, shared = (statistics.median(own[1:]) for own in seconds)
        print(f"| {lengths[0]}, {lengths[1]} | {plain:.2f} | {shared:.2f} | {plain / shared:.1f} |")


if __name__ == "__main__":
    main()

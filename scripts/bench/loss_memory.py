"""Measure the peak memory of the loss: python scripts/bench/loss_memory.py [--tokens 8192] [--vocab 150000]

It runs one forward and backward pass of `trainer.models.losses.linear_loss` on the CPU in fp32. It prints the growth of the
process and the size of the fp32 logits of all tokens. Hidden states, head and their gradients do not count.
"""

import argparse
import os
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../.."))
from trainer.models.cpu_matmul import choose_cpu_matmul
from trainer.models.losses import linear_loss, token_losses


def reset_peak() -> None:
    """Reset the peak resident size to the present size (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunk_bytes", type=int, default=token_losses.CHUNK_BYTES)
    args = parser.parse_args()
    choose_cpu_matmul("auto")  # as in training
    chunk_rows = args.chunk_bytes // (4 * args.vocab)
    hidden, weight = torch.randn(args.tokens, args.width), torch.randn(args.vocab, args.width)
    targets = torch.randint(0, args.vocab, (args.tokens,))
    few = max(1, chunk_rows // 8)
    hidden.requires_grad_(), weight.requires_grad_()
    # this first pass fills the library's buffers
    linear_loss.linear_nll(hidden[:few], weight, None, targets[:few], few).sum().backward()
    reset_peak()  # the gradients of hidden states and head already exist
    before = peak_bytes()
    linear_loss.linear_nll(hidden, weight, None, targets, chunk_rows).sum().backward()
    grown = (peak_bytes() - before) / 2**20
    logits = args.tokens * args.vocab * 4 / 2**20
    print(
        f"{args.tokens} tokens x {args.vocab} words: {grown:.0f} MiB, "
        f"1/{logits / max(grown, 1):.1f} of {logits:.0f} MiB of logits"
    )


if __name__ == "__main__":
    main()

"""Measure a sync of weights to another process: whole tensors against the values that have changed since the last sync.

    python scripts/bench/weight_deltas.py

A random model of the shape of SmolLM2-135M trains with AdamW, fp32 masters and random tokens. After every --steps_per_sync
steps, its bf16 weights go to a process that checks their checksum. Prints bytes and seconds.
"""

import argparse
import multiprocessing
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.weight_stream import LastSync, Update, WeightStream

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def receive(pipe) -> None:
    """The other process: what a server does with a stream, without vLLM's loader."""
    torch.set_num_threads(1)
    kept: dict[str, torch.Tensor] = {}
    for port, token in iter(pipe.recv, None):
        came = Checksum()
        for name, tensor in WeightStream("127.0.0.1", port, 1, 2, token).received(kept):
            came.add(name, tensor)
        pipe.send(came.hexdigest())


def sync(pipe, tensors: dict[str, torch.Tensor], last: LastSync, is_delta: bool) -> tuple[int, float, float]:
    """(bytes, seconds, share of values that changed) of one sync, with both checksums."""
    started, came, changed = time.perf_counter(), Checksum(), 0

    def updates():
        nonlocal changed
        for name, tensor in tensors.items():
            came.add(name, tensor)
            update = last.update(name, tensor) if is_delta else Update(name, tensor)
            changed += tensor.numel() if update.changed is None else len(update.changed)
            yield update

    stream = WeightStream("127.0.0.1", 0, 0, 2)
    pipe.send((stream.port, stream.token))
    sent = stream.send(updates(), while_waiting=lambda: None)
    assert pipe.recv() == came.hexdigest()
    return sent, time.perf_counter() - started, changed / sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrain", help="train this model, instead of random weights")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--steps_per_sync", type=int, default=1)
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.pretrain:
        model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    weights = dict(model.named_parameters())
    rounded = {name: tensor.detach().bfloat16() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        tensor.data.copy_(rounded[name])  # as a model that was saved in bf16
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=receive, args=(other,), daemon=True)
    process.start()
    last, found = LastSync(), []
    sync(pipe, rounded, last, is_delta=True)  # the first one is whole
    for _ in range(args.syncs):
        for _ in range(args.steps_per_sync):
            tokens = torch.randint(model.config.vocab_size, (1, args.tokens))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rounded = {name: tensor.detach().bfloat16() for name, tensor in weights.items()}
        found.append((*sync(pipe, rounded, last, is_delta=False)[:2], *sync(pipe, rounded, last, is_delta=True)))
    pipe.send(None)
    process.join(timeout=60)
    most = 2 * sum(tensor.numel() for tensor in weights.values())
    whole, whole_time, delta, delta_time, density = zip(*found)
    print(
        f"whole: {max(whole) / most:.4f} of 2 bytes a weight, {max(whole)} bytes, {statistics.median(whole_time):.2f} s"
    )
    print(
        f"delta: {max(delta) / most:.4f}, at most {max(delta)} bytes, {statistics.median(delta_time):.2f} s (medians)"
    )
    print(f"changed values: {min(density):.4f} to {max(density):.4f}")


if __name__ == "__main__":
    main()

"""Measure memory per rank and time of one row on 1, 2 and 4 sequence-parallel ranks: a table and JSON.

    python scripts/bench/ring_memory.py [--num_tokens 4096] [--per_rank] [--sp_mode ring]

The row has a fixed length. With --per_rank it has num_tokens for each rank, so the memory of a rank should not change.

saved MiB: what autograd keeps between forward and backward, without weights, on the rank with the most.
peak MiB: growth of the process's peak resident memory over one forward and backward, with gradients.
seconds: the median of 5 more forward and backward passes, on the slowest rank. The ranks share the machine's cores.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.datasets.batches.packing import collate_packed
from trainer.datasets.batches.sequence_split import split_micro_batch
from trainer.models.attention.choice import register_ring_attention
from trainer.models.losses.token_losses import label_log_probs

CONFIG = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
SP_SIZES = (1, 2, 4)
MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_tokens", type=int, default=4096, help="tokens of the row over all ranks")
    parser.add_argument(
        "--per_rank", action="store_true", help="--num_tokens counts the tokens of each rank, not of all ranks"
    )
    parser.add_argument("--sp_mode", choices=["ring", "ulysses"], default="ring", help="how attention crosses ranks")
    return parser.parse_args()


def measure(num_tokens: int, sp_mode: str) -> dict[str, float]:
    """Run forward and backward of a small Llama on this rank's shard of two documents."""
    torch.manual_seed(0)
    name = register_ring_attention(dist.group.WORLD, sp_mode)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), attn_implementation=name)
    lengths = (num_tokens // 4, num_tokens - num_tokens // 4)
    batch = collate_packed([{"input_ids": [5] * length, "loss_mask": [1] * length} for length in lengths], 0)
    shard = split_micro_batch(batch, dist.get_rank(), dist.get_world_size(), 0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def forward() -> torch.Tensor:
        return -label_log_probs(model, shard).sum()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = forward()
    loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(5):
        dist.barrier()
        started = time.perf_counter()
        forward().backward()
        times.append(time.perf_counter() - started)
    memory = {"saved_mib": sum(saved.values()) / MIB, "peak_mib": (after - before) / 1024}
    return {**memory, "seconds": statistics.median(times)}


def run_rank(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rows = [None] * dist.get_world_size()
    num_tokens = arguments.num_tokens * (dist.get_world_size() if arguments.per_rank else 1)
    dist.all_gather_object(rows, measure(num_tokens, arguments.sp_mode))
    if dist.get_rank() == 0:
        print(json.dumps({key: max(row[key] for row in rows) for key in rows[0]}))
    dist.destroy_process_group()


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        return run_rank(arguments)
    rows = []
    for sp_size in SP_SIZES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(sp_size)]
        env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sp_size))}
        output = subprocess.run([*command, *sys.argv], check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
        rows.append({"sp": sp_size, **json.loads(output.splitlines()[-1])})
    of = "tokens per rank" if arguments.per_rank else "tokens"
    print(f"{arguments.sp_mode}, {arguments.num_tokens} {of}\n sp | saved MiB per rank | peak MiB per rank | seconds")
    for row in rows:
        print(f"{row['sp']:3} | {row['saved_mib']:18.1f} | {row['peak_mib']:17.1f} | {row['seconds']:7.2f}")
    print(json.dumps({**vars(arguments), "config": CONFIG, "rows": rows}))


if __name__ == "__main__":
    main()

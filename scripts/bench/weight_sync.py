"""Measure how fast training weights reach the rollout engine of each rank.

    torchrun --nproc_per_node 2 scripts/bench/weight_sync.py --backend fsdp2

A random fp32 Qwen3 of --hidden_size and --layers is gathered tensor by tensor into the replica of every rank, --count
times. Checksums verify it. Prints the median seconds, and the MiB of one replica per second.
"""

import argparse
import statistics
import tempfile

import torch
from checkpoint_blocking import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import broadcast_object, rank_0_first
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.sync import sync_weights
from trainer.strategies.options import StrategyOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["fsdp2", "deepspeed"], default="fsdp2")
    parser.add_argument("--zero_stage", type=int)
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--count", type=int, default=5)
    args = parser.parse_args()
    if args.backend == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy as Strategy
    else:
        from trainer.strategies.fsdp2 import FSDP2Strategy as Strategy
    layout = {"zero_stage": args.zero_stage, "tensor_parallel_size": args.tensor_parallel_size}
    strategy = Strategy(StrategyOptions(param_dtype="fp32", **layout))
    strategy.setup_distributed()
    folder = broadcast_object(tempfile.mkdtemp(prefix="sync-bench-"))
    rank_0_first(lambda: (make_demo(f"{folder}/demo"), make_model(f"{folder}/model", args.hidden_size, args.layers)))
    model = strategy.load_model(f"{folder}/model", AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, _, _ = strategy.prepare((model, optimizer, scheduler))
    engine = HFEngine(
        f"{folder}/model",
        AutoTokenizer.from_pretrained(f"{folder}/demo/model"),
        dtype=torch.float32,
        device=strategy.device,
        batch_size=1,
    )
    facts = [sync_weights(strategy, model, engine) for _ in range(args.count + 1)][1:]  # the first run fills the caches
    seconds = statistics.median(fact["time_sync"] for fact in facts)
    size = facts[0]["sync_bytes"]
    strategy.print(f"{size / 2**20:.0f} MiB in {seconds:.3f} s: {size / seconds / 2**20:.0f} MiB/s to each rank")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

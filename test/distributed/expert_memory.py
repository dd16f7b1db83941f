"""Count what rank 0 of many ranks holds of a mixture of 128 experts, without the other ranks: `python expert_memory.py`.

The model is Qwen3-30B-A3B with two layers, on the meta device. Prints "ratio RANKS EP: NUMBER", the number of elements
on rank 0 over an even share.
"""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trainer.distributed.sharded_tensors import to_local_if_dtensor
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.strategies.options import StrategyOptions

CONFIG = {"num_hidden_layers": 2, "hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128}


class Unloaded(FSDP2Strategy):
    def _load_shards(self, model, offloaded):
        """The weights stay on the meta device."""


def ratio(num_ranks: int, ep: int) -> float:
    os.environ.update(WORLD_SIZE=str(num_ranks))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    strategy = Unloaded(StrategyOptions(param_dtype="fp32", expert_parallel_size=ep, device="cpu"))
    strategy.setup_distributed()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG, num_experts=128))
    total = sum(parameter.numel() for parameter in model.parameters())
    strategy.prepare(model)
    held = sum(to_local_if_dtensor(parameter).numel() for parameter in model.parameters())
    dist.destroy_process_group()
    return held / (total / num_ranks)


if __name__ == "__main__":
    for ranks, size in ((64, 1), (256, 1), (64, 8), (256, 8), (256, 128)):
        print(f"ratio {ranks} {size}: {ratio(ranks, size):.3f}", flush=True)

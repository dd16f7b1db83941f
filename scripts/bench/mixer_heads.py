"""Measure what one rank computes and keeps in a mixer: the whole mixer on each rank, and heads that ranks share.

    python scripts/bench/mixer_heads.py [--num_tokens 4096]

One process plays rank 0. Its collectives move nothing, so the seconds are those of computing alone. They are of the
processor, so other processes matter little.
GFLOP: matrix products of forward and backward, which are nearly all. MiB: what autograd keeps for the backward pass.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from trainer.models.layers.head_shares import TABLES
from trainer.models.layers.recurrent_layers import Row, change_mixers, mixers_of

COMMON = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "layer_types": ["linear_attention"]}
MODELS = {  # the published models have the same sizes of heads, and are two to four times as wide
    "gated delta net (Qwen3.5)": lambda: transformers.Qwen3_5TextConfig(**COMMON, **DELTA),
    "Mamba 2, 4 groups (Nemotron-H)": lambda: transformers.NemotronHConfig(
        **COMMON,
        layer_types=["linear_attention"],
        mamba_num_heads=32,
        mamba_head_dim=64,
        n_groups=4,
        ssm_state_size=128,
    ),
    "Mamba 2, 1 group (Bamba)": lambda: transformers.BambaConfig(
        **COMMON, num_key_value_heads=8, attn_layer_indices=[], mamba_n_heads=32, mamba_d_head=64, mamba_d_state=128
    ),
    "short convolution (LFM2)": lambda: transformers.Lfm2Config(**COMMON, num_key_value_heads=8, layer_types=["conv"]),
}
LAYOUTS = {"1 rank": (1, 1), "sp 2": (2, 1), "sp 4": (4, 1), "tp 2": (1, 2), "sp 2, tp 2": (2, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_tokens", type=int, default=4096, help="tokens of the row over all ranks")
    parser.add_argument("--repeat", type=int, default=3, help="timed passes; the table has their median")
    options = parser.parse_args()
    print("| Mixer | Layout | GFLOP: whole | shared | MiB: whole | shared | CPU seconds: whole | shared |")
    print("|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        for layout in LAYOUTS:
            pairs = zip(*(measure(name, layout, shares, options) for shares in (False, True)))
            print(f"| {name} | {layout} | " + " | ".join(f"{whole} | {own}" for whole, own in pairs) + " |", flush=True)


def measure(name: str, layout: str, shares: bool, options) -> tuple[str, str, str]:
    """GFLOP, MiB and seconds of one forward and backward pass."""
    sp, tp = LAYOUTS[layout]
    dist.init_process_group("fake", rank=0, world_size=sp * tp, store=FakeStore())
    sp_group, tp_group = dist.new_group(range(sp)), dist.new_group(range(tp))
    torch.manual_seed(0)
    (mixer,) = mixers_of(AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32).train())
    tables = dict(TABLES)
    if not shares:
        TABLES.clear()
    change_mixers([mixer], Row(), sp_group if sp > 1 else None, tp_group if tp > 1 else None)
    TABLES.update(tables)
    hidden = torch.randn(1, options.num_tokens // sp, 1024, requires_grad=True)

    def run() -> None:
        mixer(hidden_states=hidden).sum().backward()

    kept = {}  # address of a storage -> its bytes

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        run()
    for parameter in mixer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    seconds = []
    for _ in range(options.repeat):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    dist.destroy_process_group()
    products = {op: count for op, count in counter.get_flop_counts()["Global"].items() if "conv" not in str(op)}
    flops, mib = sum(products.values()) / 1e9, sum(kept.values()) / 2**20
    return f"{flops:.1f}", f"{mib:.0f}", f"{statistics.median(seconds):.2f}"


if __name__ == "__main__":
    main()

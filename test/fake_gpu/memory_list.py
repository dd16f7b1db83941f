"""The runs whose memory is compared with `plan`. This file needs no CUDA: a test holds the record to the plan of today."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.planning.plan_memory import Layout, needs, sizes_of, with_adapter

RECORD = Path(__file__).with_name("memory.json")
PAGE = Path(__file__).resolve().parents[2] / "docs/fake_gpu.md"
MIB = 2**20
TOKENS = 2048  # of a packed sample
PHASES = ("step",)


@dataclass(frozen=True)
class Cell:
    layout: Layout
    command: str = "train_sft"
    dtype: str = "bf16"
    more: str = ""
    num_frozen: int = 0
    lora_rank: int = 0
    micro: int = 1
    tokens: int = TOKENS
    num_micro: int = 2
    steps: int = 2

    @property
    def ranks(self):
        return self.layout.dp * self.layout.sp * self.layout.tp

    @property
    def name(self):
        layout = self.layout
        sizes = {"tp": layout.tp, "sp": layout.sp, "replicas": layout.dp_replicate}
        parts = [self.command.removeprefix("train_"), f"{self.ranks} x {layout.backend} {layout.stage}"]
        parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        parts += [name for name in ("offload", "checkpointing", "reduce_once") if getattr(layout, name)]
        parts += [f"lora {self.lora_rank}"] * bool(self.lora_rank) + [self.more] * bool(self.more)
        parts += [f"{self.tokens} tokens"] * (self.tokens != TOKENS)
        parts += [f"{self.num_micro} micro-batches"] * (self.num_micro != 2)
        return " ".join([*parts, self.dtype])


def make_config(**more):
    """42 M parameters, three tenths of them in the embedding and the head."""
    return LlamaConfig(
        vocab_size=12288, hidden_size=512, intermediate_size=1408, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=65536, **more,
    )  # fmt: skip


@functools.cache
def model():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config())


def planned(cell):
    sequences = 2 if cell.command == "train_dpo" else 1
    tokens = sequences * cell.micro * cell.tokens // cell.layout.sp
    sizes = with_adapter(sizes_of(model()), model(), cell.lora_rank) if cell.lora_rank else sizes_of(model())
    return needs(cell.layout, sizes, tokens, cell.dtype, cell.num_frozen, cell.num_micro > 1, cell.tokens)


def all_cells():
    stages = [("fsdp2", 3), ("fsdp2", 2), *(("deepspeed", stage) for stage in range(4))]
    large = [("fsdp2", 3), ("deepspeed", 2), ("deepspeed", 3)]
    found = [Cell(Layout(b, s, dp_shard=1)) for b, s in stages if (b, s) != ("fsdp2", 2)]
    found += [Cell(Layout(b, s, dp_shard=2)) for b, s in stages]
    found += [Cell(Layout(b, s, dp_shard=1, checkpointing=True)) for b, s in large]
    found += [Cell(Layout(b, s, dp_shard=1), dtype="fp32") for b, s in large]
    found += [Cell(Layout("fsdp2", 3, dp_shard=1, offload=True))]
    found += [Cell(Layout(b, s, dp_shard=1), "train_ppo", num_frozen=1) for b, s in large]
    found += [Cell(Layout(b, s, dp_shard=1), "train_dpo", num_frozen=1, tokens=1024) for b, s in large]
    found += [Cell(Layout(b, s, tp=2)) for b, s in (("fsdp2", 3), ("deepspeed", 2))]
    found += [Cell(Layout(b, s, sp=2)) for b, s in (("fsdp2", 3), ("deepspeed", 2))]
    found += [Cell(Layout(b, s, dp_shard=1), num_micro=1) for b, s in (("fsdp2", 3), ("deepspeed", 2))]
    found += [Cell(Layout("fsdp2", 3, dp_shard=2, reduce_once=True))]
    found += [
        Cell(Layout(b, s, dp_shard=n), lora_rank=64)
        for b, s, n in (("fsdp2", 3, 1), *((*stage, 2) for stage in stages))
    ]
    found += [Cell(Layout(b, s, dp_shard=1, checkpointing=True), lora_rank=64) for b, s in large]
    found += [
        Cell(Layout("fsdp2", 3, tp=2), lora_rank=64),
        Cell(Layout("fsdp2", 3, dp_shard=1), dtype="fp32", lora_rank=64),
    ]
    return found


def table(record):
    """Measured and planned MiB of each cell, as Markdown."""
    lines = ["| Run | peak of a step, MiB | `plan` | peak / plan |", "|---|---:|---:|---:|"]
    for cell in all_cells():
        row, plan = record[cell.name], planned(cell)
        figures = [f"{number:.0f}" for phase in PHASES for number in (row[phase], getattr(plan, phase) / MIB)]
        lines.append(f"| `{cell.name}` | {' | '.join(figures)} | {row['step'] * MIB / plan.step:.2f} |")
    return "\n".join(lines)


def write_page(record):
    before, _, after = PAGE.read_text().partition("<!-- memory -->\n")
    PAGE.write_text(
        f"{before}<!-- memory -->\n{table(record)}\n<!-- end of memory -->{after.partition('<!-- end of memory -->')[2]}"
    )

"""Embedding and head have FSDP groups of their own: the root does not hold both, whole, for the whole step."""

import json

import torch
from launch import ROOT, read_steps, torchrun
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer.datasets.demo import make_demo

VOCAB, WIDTH = 20000, 128


def test_groups_of_embedding_and_head_lower_the_peak(tmp_path):
    folder = tmp_path / "demo"
    make_demo(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    code, output = torchrun(2, str(ROOT / "test/strategies/group_memory.py"), str(folder), timeout=300)
    assert code == 0, output[-6000:]
    peaks = json.loads((folder / "peaks.json").read_text())
    print({name: f"{peak / 2**20:.1f} MiB" for name, peak in peaks.items()})
    assert peaks["split"] <= peaks["whole"] - 2 * VOCAB * WIDTH  # one matrix in bf16
    for one, other in zip(read_steps(folder / "split"), read_steps(folder / "whole"), strict=True):
        assert one["loss"] == other["loss"]

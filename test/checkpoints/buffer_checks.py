"""Run by torchrun: the buffers that no folder holds are, on a sharded model, those of an ordinary from_pretrained.

`torchrun buffer_checks.py FOLDER`; FOLDER gets one model per architecture. Every rank starts with memory full of garbage.
"""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM

from trainer.entry import end_well
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.strategies.options import StrategyOptions

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
ARCHITECTURES = {
    "FalconH1": {
        **MAMBA,
        "mamba_d_ssm": 32,
        "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 1.7],
    },  # a buffer computed by the parent
    "Qwen3": {},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32},  # a scale that it keeps in bf16
    "Gemma3Text": {},  # an embedding scale, and a RoPE table for each kind of layer
}

folder = sys.argv[1]
strategy = FSDP2Strategy(StrategyOptions(param_dtype="fp32"))
strategy.setup_distributed()
for name, more in ARCHITECTURES.items():
    path = os.path.join(folder, name)
    if strategy.is_rank_0():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**(SIZES | more))).save_pretrained(path)
    dist.barrier()
    expected = dict(AutoModelForCausalLM.from_pretrained(path).named_buffers())
    # what torch.empty finds afterwards
    garbage = [torch.full((size,), 1e30) for size in (1 << 8, 1 << 12, 1 << 16) for _ in range(64)]
    del garbage
    model = strategy.prepare(strategy.load_model(path, AutoModelForCausalLM).requires_grad_(False))
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for key, buffer in found.items():
        assert torch.equal(buffer, expected[key]), (name, key)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        logits, plain = model(ids).logits, AutoModelForCausalLM.from_pretrained(path)(ids).logits
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    if strategy.is_rank_0():
        print(f"ok {name}: {len(expected)} buffers", flush=True)
end_well()

"""Tiny random models of eight kinds, for the table of docs/exact.md: `python test/exact_models.py FOLDER TOKENIZER`.

The tokenizer of stories260K has 512 words. Norms and biases are random, since ones and zeros would hide a wrong factor.
"""

import sys
from collections.abc import Collection

import torch
from tiny_models import COMMON
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

SIZES = {**COMMON, "vocab_size": 512, "max_position_embeddings": 512}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=8),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "gemma": lambda: GemmaConfig(**SIZES),
    "gpt2": lambda: GPT2Config(vocab_size=512, n_positions=512, n_embd=32, n_layer=3, n_head=4, initializer_range=0.2),
}  # fmt: skip


def save_models(folder: str, tokenizer_folder: str, names: Collection[str] = CONFIGS) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for name in names:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")


if __name__ == "__main__":
    save_models(*sys.argv[1:])

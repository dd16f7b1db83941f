"""Tiny random models of every architecture that has a tensor-parallel plan here; awkward on purpose.

97 words divide by neither 2 nor 4; norms and biases are random, since ones and zeros would hide a wrong factor.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "eos_token_id": 1,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=False),
    "llama_bias": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
    ),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=8, tie_word_embeddings=False),
    # no plan of ours: its own gathers queries and keys in the block, since one norm spans all heads
    "olmo2": lambda: Olmo2Config(**{**COMMON, "head_dim": 4}, tie_word_embeddings=False),
}


# with a vocabulary that tp divides, as AutoTP needs it; no olmo2, whose query norm needs gathered heads
EVEN_CONFIGS = {f"{name}_even": config for name, config in CONFIGS.items() if name != "olmo2"}


def make_model(architecture: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = (CONFIGS | EVEN_CONFIGS)[architecture]()
    if architecture in EVEN_CONFIGS:
        config.vocab_size = 96
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save_models(folder: str) -> None:
    for architecture in CONFIGS | EVEN_CONFIGS:
        make_model(architecture).save_pretrained(f"{folder}/{architecture}")

"""Tiny models without a usable tensor-parallel plan in transformers, and the layouts that they are tried in."""

import torch
import transformers
from launch import FULL
from transformers import AutoModelForCausalLM

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 96}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),  # no plan of ours: every linear layer gathers its output
    "stablelm": ("StableLm", {"qk_layernorm": True}),
    "apertus": ("Apertus", {}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    # heads that two ranks do not share: every rank computes all of them. 97 rows of the vocabulary are 49 and 48
    "gemma3_text": ("Gemma3Text", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8, "vocab_size": 97}),
    "llama": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "vocab_size": 97}),
    "llama4": ("Llama4Text", {  # every expert computes all tokens
        "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
    }),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "falcon_h1": ("FalconH1", {"head_dim": 8, "mamba_d_ssm": 64, **MAMBA}),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48, **MAMBA,
    }),
    "nemotron_h": ("NemotronH", {
        "num_hidden_layers": None, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "head_dim": 8,
    }),
    "qwen3_5": ("Qwen3_5Text", {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], **DELTA_NET}),
    "gemma4_experts": ("Gemma4Text", {  # router and experts stand in the layer, as in gemma-4-26B-A4B
        "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 8, "num_experts": 4, "top_k_experts": 2,
        "enable_moe_block": True, "moe_intermediate_size": 16,
    }),
    "gemma4_images": ("Gemma4", {  # tensor parallelism cuts the text part only
        **dict.fromkeys(SIZES), "audio_config": None,
        "text_config": {**SIZES, "head_dim": 8, "global_head_dim": 4, "layer_types": 2 * ["full_attention"], "hidden_size_per_layer_input": 0},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
                          "num_key_value_heads": 4, "head_dim": 8},
    }),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
}  # fmt: skip
LAYOUTS = {
    "fsdp2": {"tensor_parallel_size": 2},
    "z1": {"tensor_parallel_size": 2, "zero_stage": 1},
}
EXTRA = [("gpt2", "z3", {"tensor_parallel_size": 2, "zero_stage": 3})]


def layouts_of(name: str) -> dict[str, dict]:
    """One in turn, or all with `PARITY=full`."""
    turn = list(LAYOUTS)[list(MODELS).index(name) % len(LAYOUTS)]
    return LAYOUTS if FULL else {turn: LAYOUTS[turn]}


def make_config(name: str):
    kind, options = MODELS[name]
    options = {key: value for key, value in (SIZES | options).items() if value is not None}
    return getattr(transformers, f"{kind}Config")(**options)


def save_model(name: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(f"{folder}/{name}")

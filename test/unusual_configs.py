"""More rows of the zoo, unusual in one way each: head counts, windows, layer patterns, biases, ties, odd sizes.

No published model has most of them. A layout that is right only for usual configs fails here.
"""

import functools

from transformers import CONFIG_MAPPING

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
HEAD = {"head_dim": 8}
SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **HEAD,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
NEMOTRON = {
    "num_hidden_layers": None, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
    "chunk_size": 16, "moe_shared_expert_intermediate_size": 24, **HEAD, **ROUTED,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 48, **MAMBA}
H1 = {**HEAD, **MAMBA, "mamba_d_ssm": 32, "mamba_d_head": 8}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, **HEAD}
GEMMA4 = {
    "global_head_dim": 16, "hidden_size_per_layer_input": 0, "sliding_window": 6, "layer_types": [SLIDING, FULL],
    "num_global_key_value_heads": 2, **HEAD,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, **ROUTED,
}  # fmt: skip
ROPE = {"rope_theta": 1e4}
SHORT_ROPE = {**ROPE, "original_max_position_embeddings": 32}
# name: (what is unusual, model_type, arguments of its config besides SIZES)
UNUSUAL: dict[str, tuple[str, str, dict]] = {
    "llama-1-kv-head": ("one layer, one KV head", "llama", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "llama-9-heads": (
        "9 heads on 3 KV heads",
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36},
    ),
    "llama-1-head": ("one head", "llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "llama-5-wide-heads": (
        "5 heads wider than the hidden size",
        "llama",
        {"hidden_size": 30, "num_attention_heads": 5, "num_key_value_heads": 5, **HEAD},
    ),
    "llama-biases": (
        "all biases, tied embeddings",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-321-tokens": ("an odd vocabulary", "llama", {"vocab_size": 321}),
    "llama-321-tied": (
        "an odd vocabulary, tied embeddings",
        "llama",
        {"vocab_size": 321, "tie_word_embeddings": True},
    ),
    "llama-47-columns": ("an odd width of the MLP", "llama", {"intermediate_size": 47}),
    "llama-yarn": ("YaRN", "llama", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, **SHORT_ROPE}}),
    "llama-dynamic": (
        "dynamic rotary embedding, texts beyond its length",
        "llama",
        {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE}},
    ),
    "llama-partial": (
        "partial rotary embedding",
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **ROPE}},
    ),
    "mistral-window-1": ("each token sees itself", "mistral", {"sliding_window": 1}),
    "mistral-window-5": ("a window shorter than the documents", "mistral", {"sliding_window": 5}),
    "qwen2-mixed": (
        "a window in the middle layer",
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": [FULL, SLIDING, FULL],
        },
    ),
    "qwen2-14-heads": (
        "14 heads on 2, tied embeddings, as Qwen2.5-0.5B",
        "qwen2",
        {"num_attention_heads": 14, "hidden_size": 56, "tie_word_embeddings": True},
    ),
    "qwen3-1-layer": (
        "one layer, biases, wide heads",
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "num_hidden_layers": 1},
    ),
    "qwen3-5-experts": (
        "5 experts, 3 for each token",
        "qwen3_moe",
        {**HEAD, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    ),
    "qwen3_5-linear": ("no layer with attention", "qwen3_5_text", {**DELTA, "layer_types": 2 * [LINEAR]}),
    "qwen3_5-full": ("no linear layer", "qwen3_5_text", {**DELTA, "layer_types": 2 * [FULL]}),
    "qwen3_5-reversed": (
        "attention first, tied embeddings",
        "qwen3_5_text",
        {**DELTA, "num_hidden_layers": 3, "layer_types": [FULL, LINEAR, LINEAR], "tie_word_embeddings": True},
    ),
    "qwen3_5-3-key-heads": (
        "3 linear key heads, one KV head, values wider than keys",
        "qwen3_5_text",
        {
            **DELTA,
            "num_key_value_heads": 1,
            "layer_types": [LINEAR, FULL],
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 3,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3_next-dense": (
        "no experts",
        "qwen3_next",
        {**DELTA, "layer_types": [LINEAR, FULL], "num_experts": 0, "mlp_only_layers": [0, 1]},
    ),
    "qwen3_next-mixed": (
        "one dense layer, one expert for each token",
        "qwen3_next",
        {
            **DELTA,
            **EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "nemotron_h-pattern": ("the pattern M-M*-", "nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M-M*-"}),
    "nemotron_h-attention-first": (
        "attention first",
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["attention", "mamba", "mlp"]},
    ),
    "nemotron_h-mamba": ("only Mamba layers", "nemotron_h", {**NEMOTRON, "layers_block_type": ["mamba", "mamba"]}),
    "nemotron_h-no-mamba": ("no Mamba layer", "nemotron_h", {**NEMOTRON, "layers_block_type": ["attention", "mlp"]}),
    "nemotron_h-experts": (
        "experts and an MLP",
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]},
    ),
    "nemotron_h-biases": (
        "biases, but none of the convolution",
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "use_conv_bias": False,
        },
    ),
    "granite4-nope": (
        "attention only, without positions",
        "granitemoehybrid",
        {**GRANITE, "layer_types": 2 * [FULL], "position_embedding_type": "nope"},
    ),
    "granite4-mamba": ("only Mamba layers", "granitemoehybrid", {**GRANITE, "layer_types": 2 * [LINEAR]}),
    "granite4-3-experts": (
        "3 experts, untied embeddings",
        "granitemoehybrid",
        {
            **GRANITE,
            "num_hidden_layers": 3,
            "layer_types": [FULL, LINEAR, FULL],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_h1-tied": (
        "2 groups, a gated norm, all biases, tied embeddings",
        "falcon_h1",
        {
            **H1,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-3-heads": (
        "3 Mamba heads, one KV head",
        "falcon_h1",
        {**H1, "num_key_value_heads": 1, "mamba_d_ssm": 24, "mamba_n_heads": 3, "mamba_chunk_size": 8},
    ),
    "lfm2-conv": ("only convolutions", "lfm2", {"layer_types": ["conv", "conv"], "block_multiple_of": 16}),
    "lfm2-biases": (
        "attention first, one KV head, longer convolutions with biases",
        "lfm2",
        {
            "layer_types": [FULL, "conv", "conv"],
            "num_hidden_layers": 3,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 16,
            "num_key_value_heads": 1,
        },
    ),
    "gemma2-low-caps": (
        "low soft caps, short windows after full attention",
        "gemma2",
        {
            **HEAD,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
        },
    ),
    "gemma3-1-kv-head": (
        "one KV head and wide heads, as gemma-3-1b",
        "gemma3_text",
        {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 6, "layer_types": [SLIDING, FULL]},
    ),
    "gemma4-shared-keys": (
        "one KV head, inputs by layer, shared keys",
        "gemma4_text",
        {
            **GEMMA4,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "num_hidden_layers": 4,
            "layer_types": 2 * [SLIDING, FULL],
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4-experts": (
        "experts beside the MLP",
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma4-keys-as-values": (
        "keys are values, one global KV head",
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gpt_oss-sliding": ("only windows of 4", "gpt_oss", {**GPT_OSS, "layer_types": 2 * [SLIDING]}),
    "gpt_oss-1-kv-head": (
        "one layer, one KV head",
        "gpt_oss",
        {**GPT_OSS, "num_hidden_layers": 1, "layer_types": [FULL], "num_key_value_heads": 1},
    ),
    "gpt_oss-3-experts": (
        "3 experts, tied embeddings",
        "gpt_oss",
        {**GPT_OSS, "layer_types": [FULL, SLIDING], "num_local_experts": 3, "tie_word_embeddings": True},
    ),
    "llama4-nope": (
        "a layer without positions that tunes its queries, chunks of 8",
        "llama4_text",
        {
            **HEAD,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 8,
            "use_qk_norm": False,
            "layer_types": [CHUNKED, CHUNKED, FULL, CHUNKED],
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "smollm3-nope": (
        "first and last layer without positions, a window between",
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": [FULL, SLIDING, FULL],
        },
    ),
    "cohere2-1-layer": (
        "one layer without positions",
        "cohere2",
        {"num_hidden_layers": 1, "layer_types": [FULL], "sliding_window": 5, "logit_scale": 0.25},
    ),
    "olmo3-window-3": ("only windows of 3", "olmo3", {"layer_types": 2 * [SLIDING], "sliding_window": 3}),
    "glm4-1-kv-head": (
        "one KV head, biases, half of each head rotates",
        "glm4",
        {**HEAD, "partial_rotary_factor": 0.5, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "glm4_moe-norms": (
        "norms of heads",
        "glm4_moe",
        {**HEAD, **ROUTED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    ),
    "deepseek_v3-no-q-lora": (
        "queries of full rank, no dense layer",
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "deepseek_v3-3-heads": (
        "3 heads, no experts",
        "deepseek_v3",
        {**LATENT, "first_k_dense_replace": 2, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "phi3-longrope": (
        "half of each head rotates, texts beyond the first length of LongRoPE",
        "phi3",
        {
            "sliding_window": 6,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1],
                "long_factor": [2.0, 3.0],
                "partial_rotary_factor": 0.5,
                "factor": 8.0,
                **SHORT_ROPE,
            },
        },
    ),
    "phi3-1-kv-head": ("one KV head in a fused projection", "phi3", {"num_key_value_heads": 1}),
    "stablelm-parallel": (
        "parallel blocks, norms of heads, biases, one KV head",
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "num_key_value_heads": 1},
    ),
    "gpt2-3-heads": (
        "one layer, 3 heads, an odd vocabulary, scores scaled by layer",
        "gpt2",
        {
            **dict.fromkeys(SIZES),
            "n_embd": 30,
            "n_head": 3,
            "n_layer": 1,
            "n_positions": 128,
            "vocab_size": 321,
            "scale_attn_by_inverse_layer_idx": True,
            "initializer_range": 0.2,
            "pad_token_id": 0,
        },
    ),
    "seed_oss-wide-heads": (
        "wide heads, a bias behind attention",
        "seed_oss",
        {"head_dim": 16, "attention_out_bias": True},
    ),
}


def unusual_config(name: str):
    """The config of a row of this table. A value of None leaves the argument out."""
    _, model_type, settings = UNUSUAL[name]
    kept = {key for key, value in settings.items() if value is not None or key not in SIZES}
    sizes = {key: value for key, value in SIZES.items() if key not in settings}
    return CONFIG_MAPPING[model_type](**sizes, **{key: value for key, value in settings.items() if key in kept})


# what `python -m scripts.zoo --configs` reads: {name: (what is unusual, function that makes the config)}
CONFIGS = {name: (about, functools.partial(unusual_config, name)) for name, (about, _, _) in UNUSUAL.items()}

"""Tiny configurations of models with layers that are not attention: delta rules, state spaces, short convolutions."""

import transformers

COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2, "num_hidden_layers": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
LINEAR_FULL = ["linear_attention", "full_attention"]
CONFIGS = {
    "qwen3_5": lambda **o: transformers.Qwen3_5TextConfig(**(COMMON | DELTA | {"layer_types": LINEAR_FULL} | o)),
    "qwen3_5_moe": lambda **o: transformers.Qwen3_5MoeTextConfig(
        **(COMMON | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16, "layer_types": LINEAR_FULL} | o)
    ),
    "qwen3_next": lambda **o: transformers.Qwen3NextConfig(
        **(COMMON | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16, "layer_types": LINEAR_FULL} | o)
    ),
    "olmo_hybrid": lambda **o: transformers.OlmoHybridConfig(**(COMMON | DELTA | {"layer_types": LINEAR_FULL} | o)),
    "nemotron_h": lambda **o: transformers.NemotronHConfig(
        **(
            COMMON | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"]}
            | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16}
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
            | {"topk_group": 1, "moe_shared_expert_intermediate_size": 16, "mamba_n_groups": 1} | o
        )
    ),
    "falcon_h1": lambda **o: transformers.FalconH1Config(
        **(COMMON | MAMBA_2 | {"mamba_d_ssm": 64, "ssm_multipliers": [0.5, 0.7, 1.1, 1.3, 1.7]} | o)
    ),
    "bamba": lambda **o: transformers.BambaConfig(**(COMMON | MAMBA_2 | {"attn_layer_indices": [1]} | o)),
    "granitemoehybrid": lambda **o: transformers.GraniteMoeHybridConfig(
        **(COMMON | MAMBA_2 | EXPERTS | {"shared_intermediate_size": 16, "layer_types": LINEAR_FULL} | o)
    ),
    "lfm2": lambda **o: transformers.Lfm2Config(
        **(COMMON | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "conv_L_cache": 3} | o)
    ),
    "lfm2_moe": lambda **o: transformers.Lfm2MoeConfig(
        **(COMMON | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1} | o)
    ),
    "jamba": lambda **o: transformers.JambaConfig(
        **(COMMON | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2} | o)
    ),
    "mamba": lambda **o: transformers.MambaConfig(**(COMMON | {"state_size": 8, "expand": 2} | o)),
    "falcon_mamba": lambda **o: transformers.FalconMambaConfig(**(COMMON | {"state_size": 8, "expand": 2} | o)),
    "mamba2": lambda **o: transformers.Mamba2Config(
        **(COMMON | {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16} | o)
    ),
    "minimax": lambda **o: transformers.MiniMaxConfig(
        **(COMMON | EXPERTS | {"layer_types": LINEAR_FULL, "block_size": 8} | o)
    ),
    "zamba": lambda **o: transformers.ZambaConfig(
        **(COMMON | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "n_mamba_heads": 2} | o)
    ),
    "zamba2": lambda **o: transformers.Zamba2Config(
        **(COMMON | {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8} | o)
    ),
    "kimi_linear": lambda **o: transformers.KimiLinearConfig(
        **(COMMON | EXPERTS | MLA | {"layer_types": LINEAR_FULL, "linear_head_dim": 8, "linear_num_heads": 4} | o)
    ),
}  # fmt: skip

"""The models of the zoo: what the default config of an architecture lacks, and which architectures are no models of it.

A name is a `model_type` of transformers. The tiny model has the layers and options of the published models, which
scripts/docs/zoo_families.json lists.
"""

from trainer.compare.zoo.tiny import shrink

# What the class of a config does not set by itself, but the published models do: arguments of its constructor.
GROUPED = {"num_key_value_heads": 8}
MROPE = {"rope_type": "default", "mrope_section": [22, 22, 20]}
SETTINGS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "granite", "olmo2", "seed_oss", "stablelm", "nemotron"), GROUPED),
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10000.0, **MROPE}}},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {
        "layer_types": 2 * (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 10)
    },
    "hunyuan_v1_dense": {"head_dim": 128, **GROUPED},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, **GROUPED},
    "laguna": {"layer_types": 10 * (["full_attention"] + ["sliding_attention"] * 3)},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": 8 * ["conv", "conv", "full_attention", "conv"]},
    "mellum": {"layer_types": 7 * (["sliding_attention"] * 3 + ["full_attention"])},
    "ministral": {"head_dim": 128},
    "minimax_m3_vl_text": {"layer_types": 3 * ["full_attention"] + 57 * ["indexed_attention"]},
    "mixtral": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"autocast_kernel_dtype": "float32"},
}
# Values of the tiny config where small sizes of the usual kind do not fit together.
PAIRS = {"num_hidden_layers": 4, "layer_types": 2 * ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2}
OVERRIDES = {
    # a sparsity of 0.95 would leave some tokens none of 64 neurons, and the norm behind them would divide by almost zero
    "gemma3n_text": {**PAIRS, "intermediate_size": 4 * [64], "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0]},
    "gemma4_text": {**PAIRS, "per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}}},
}

IMAGES = "a model of images and text; its text part has a row of its own"
ENCODER = "an encoder, or the decoder of an encoder-decoder model: not trained as a causal language model"
ENCODERS = """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text
    electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm
    roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod"""
SKIPPED = {
    **dict.fromkeys(("mllama", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "gemma3", "gemma3n", "gemma4"), IMAGES),
    **dict.fromkeys(("gemma4_unified", "phi4_multimodal", "emu3", "got_ocr2", "fuyu"), IMAGES),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "a draft model that reads another model's states"
    ),
    "mllama": "a model of images and text",
    "emu3": "a model of images and text",
    "got_ocr2": "a model of images and text",
    "phi4_multimodal": "a model of images, speech and text",
    "fuyu": "a model of images and text; its text part is persimmon",
    "blt": "reads bytes in patches of a second model: no tokens",
    "hrm_text": "its prompts attend in both directions: not a causal language model",
    "gpt-sw3": "the same class as gpt2",
    "musicgen": "predicts audio tokens",
    "musicgen_melody": "predicts audio tokens",
    "moshi": "predicts audio tokens",
    "cpmant": "its mask wants padding on the left: not trained",
    "git": "a model of images and text",
    "reformer": "its hashing attention draws random numbers in every pass",
    **dict.fromkeys(ENCODERS.split(), ENCODER),
}


def tiny_config(model_type: str):
    """The tiny config of an architecture, with the layers of its published models."""
    # not at the top: `import_libraries` sets the environment first
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    return shrink(config, **OVERRIDES.get(model_type, {}))


def zoo_names() -> list[str]:
    """Every architecture that transformers' table of causal language models holds, but those of `SKIPPED`."""
    # not at the top: `import_libraries` sets the environment first
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    return [name for name in classes if name not in SKIPPED]

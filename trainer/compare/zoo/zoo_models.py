"""The models of the zoo: which published models each architecture stands for, and what its default config lacks.

A name is a `model_type` of transformers. The tiny model has the layers and options of the published models.
"""

from trainer.compare.zoo.tiny import shrink

# family: {model_type: published models, as people search for them}
FAMILIES = {
    "Llama": {
        "llama": "Llama-2-7b, Llama-3.1-8B, Llama-3.2-1B, Llama-3.3-70B, TinyLlama, SmolLM2-1.7B, Yi-34B, "
        "deepseek-llm-7b, Vicuna",
        "llama4_text": "Llama-4-Scout-17B-16E, Llama-4-Maverick-17B-128E (text part)",
        "mllama": "Llama-3.2-11B-Vision, Llama-3.2-90B-Vision",
        "llama4": "Llama-4-Scout-17B-16E, Llama-4-Maverick-17B-128E",
    },
    "Qwen": {
        "qwen2": "Qwen2-7B, Qwen2.5-0.5B to Qwen2.5-72B, Qwen2.5-Coder-32B, QwQ-32B, DeepSeek-R1-Distill-Qwen-7B",
        "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        "qwen3": "Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, Qwen3-8B, Qwen3-14B, Qwen3-32B",
        "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-480B-A35B",
        "qwen3_next": "Qwen3-Next-80B-A3B",
        "qwen3_5_text": "Qwen3.5-27B (text part)",
        "qwen3_5_moe_text": "Qwen3.5-35B-A3B (text part)",
        "qwen4_exp_text": "Qwen4-Exp (text part)",
        "qwen3_5": "Qwen3.5-27B",
        "qwen3_5_moe": "Qwen3.5-35B-A3B",
        "qwen4_exp": "Qwen4-Exp",
    },
    "DeepSeek": {
        "deepseek_v2": "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V2.5, DeepSeek-Coder-V2",
        "deepseek_v3": "DeepSeek-V3, DeepSeek-V3.1, DeepSeek-R1, Kimi-K2, Moonlight-16B-A3B",
        "deepseek_v32": "DeepSeek-V3.2-Exp",
        "deepseek_v4": "DeepSeek-V4-Flash-Base",
    },
    "Mistral": {
        "mistral": "Mistral-7B-v0.1, Mistral-7B-v0.3, Mistral-Nemo-12B, Mistral-Small-24B, Zephyr-7B",
        "mixtral": "Mixtral-8x7B, Mixtral-8x22B",
        "ministral": "Ministral-8B-Instruct-2410",
        "ministral3": "Ministral-3-3B, Ministral-3-8B, Ministral-3-14B (text part)",
    },
    "Gemma": {
        "gemma": "gemma-2b, gemma-7b, codegemma-7b",
        "gemma2": "gemma-2-2b, gemma-2-9b, gemma-2-27b",
        "gemma3_text": "gemma-3-270m, gemma-3-1b, and the text part of gemma-3-4b, gemma-3-12b, gemma-3-27b",
        "gemma3n_text": "gemma-3n-E2B, gemma-3n-E4B (text part)",
        "gemma4_text": "gemma-4-e2b, gemma-4-e4b (text part)",
        "gemma4_unified_text": "gemma-4-12B (text part)",
        "recurrent_gemma": "recurrentgemma-2b, recurrentgemma-9b",
        "vaultgemma": "vaultgemma-1b",
        "gemma3": "gemma-3-4b, gemma-3-12b, gemma-3-27b",
        "gemma3n": "gemma-3n-E2B, gemma-3n-E4B",
        "gemma4": "gemma-4-e2b, gemma-4-e4b",
        "gemma4_unified": "gemma-4-12B",
        "gemma4_assistant": "the draft models of gemma-4-e2b",
        "gemma4_unified_assistant": "the draft model of gemma-4-12B",
    },
    "OpenAI": {
        "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
        "gpt2": "gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, gpt-sw3-126m",
        "openai-gpt": "openai-gpt",
    },
    "GLM": {
        "glm": "glm-4-9b, glm-edge-1.5b",
        "glm4": "GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1-9B",
        "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
        "glm4_moe_lite": "GLM-4.7-Flash",
        "glm_moe_dsa": "GLM-5",
    },
    "Phi": {
        "phi": "phi-1, phi-1_5, phi-2",
        "phi3": "Phi-3-mini-4k, Phi-3-medium, Phi-3.5-mini, phi-4, Phi-4-mini",
        "phimoe": "Phi-3.5-MoE",
        "phi4_multimodal": "Phi-4-multimodal",
    },
    "Granite": {
        "granite": "granite-3.0-8b, granite-3.1-2b, granite-3.3-8b",
        "granitemoe": "granite-3.0-1b-a400m, granite-3.0-3b-a800m",
        "granitemoeshared": "granite mixtures of experts with a shared expert",
        "granitemoehybrid": "granite-4.0-micro, granite-4.0-tiny, granite-4.0-h-small",
        "granite_swa": "granite-swash-2b",
        "granitemoe_swa": "granite-swash-3b-a600m",
        "bamba": "Bamba-9B",
    },
    "OLMo": {
        "olmo": "OLMo-1B-hf, OLMo-7B-hf",
        "olmo2": "OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B, OLMo-2-0325-32B",
        "olmo3": "Olmo-3-7B, Olmo-3-32B",
        "olmo_hybrid": "Olmo-Hybrid-7B",
        "olmoe": "OLMoE-1B-7B-0924",
        "flex_olmo": "FlexOlmo-7x7B-1T",
    },
    "Cohere": {
        "cohere": "c4ai-command-r-v01, c4ai-command-r-plus, aya-23-8B",
        "cohere2": "c4ai-command-r7b-12-2024, c4ai-command-a-03-2025",
        "cohere2_moe": "command-a-plus-05-2026",
        "cohere_compass_text": "North-Micro-Vision-Instruct (text part)",
    },
    "Falcon": {
        "falcon": "falcon-7b, falcon-40b, falcon-11B",
        "falcon_h1": "Falcon-H1-0.5B to Falcon-H1-34B",
        "falcon_mamba": "falcon-mamba-7b",
    },
    "NVIDIA": {
        "nemotron": "Minitron-4B, Nemotron-4-340B",
        "nemotron_h": "NVIDIA-Nemotron-Nano-9B-v2, NVIDIA-Nemotron-3-Nano-30B-A3B",
    },
    "MiniMax, Moonshot, Xiaomi, Meituan": {
        "minimax": "MiniMax-Text-01, MiniMax-M1",
        "minimax_m2": "MiniMax-M2",
        "minimax_m3_vl_text": "MiniMax-M3 (text part)",
        "kimi_linear": "Kimi-Linear-48B-A3B",
        "mimo_v2_flash": "MiMo-V2-Flash",
        "longcat_flash": "LongCat-Flash-Chat",
    },
    "Tencent and Baidu": {
        "hunyuan_v1_dense": "Hunyuan-0.5B, Hunyuan-1.8B, Hunyuan-4B, Hunyuan-7B",
        "hunyuan_v1_moe": "Hunyuan-A13B",
        "hy_v3": "Hy3-preview",
        "hy_v4": "Hy4-preview",
        "youtu": "Youtu-LLM-2B",
        "ernie4_5": "ERNIE-4.5-0.3B",
        "ernie4_5_moe": "ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B",
    },
    "Other laboratories": {
        "afmoe": "Trinity-Mini, Trinity-Nano",
        "apertus": "Apertus-8B, Apertus-70B",
        "arcee": "AFM-4.5B",
        "aria_text": "Aria (text part)",
        "axk1": "A.X-K1",
        "axk2": "A.X-K2",
        "bitnet": "bitnet-b1.58-2B-4T",
        "cwm": "cwm",
        "dbrx": "dbrx-base, dbrx-instruct",
        "diffllama": "DiffLlama-0.3B-handcut",
        "doge": "Doge-20M, Doge-320M",
        "dots1": "dots.llm1.base, dots.llm1.inst",
        "exaone4": "EXAONE-4.0-1.2B, EXAONE-4.0-32B",
        "exaone_moe": "K-EXAONE-236B-A23B",
        "helium": "helium-1-preview, helium-1-2b",
        "hrm_text": "HRM-Text",
        "hyperclovax": "HyperCLOVAX-SEED-Think-14B",
        "inkling_text": "Inkling (text part)",
        "jais2": "Jais-2-8B, Jais-2-70B",
        "jamba": "Jamba-v0.1, AI21-Jamba-1.5-Mini, AI21-Jamba-1.5-Large",
        "jetmoe": "jetmoe-8b",
        "laguna": "laguna-XS.2",
        "lfm2": "LFM2-350M, LFM2-700M, LFM2-1.2B, LFM2-2.6B",
        "lfm2_moe": "LFM2-8B-A1B",
        "mellum": "Mellum2-12B-A2.5B",
        "minicpm3": "MiniCPM3-4B",
        "modernbert-decoder": "ettin-decoder-17m to ettin-decoder-1b",
        "nanochat": "nanochat-d32",
        "seed_oss": "Seed-OSS-36B",
        "smollm3": "SmolLM3-3B",
        "solar_open": "Solar-Open-100B",
        "stablelm": "stablelm-3b-4e1t, stablelm-2-1_6b, stablelm-2-12b",
        "starcoder2": "starcoder2-3b, starcoder2-7b, starcoder2-15b",
        "zaya": "ZAYA1-8B",
        "emu3": "Emu3-Chat",
        "blt": "blt-1b",
        "got_ocr2": "GOT-OCR2",
        "fuyu": "fuyu-8b",
    },
    "State space and recurrent": {
        "mamba": "mamba-130m to mamba-2.8b",
        "mamba2": "mamba2-130m to mamba2-2.7b, Mamba-Codestral-7B",
        "rwkv": "rwkv-4-169m-pile to rwkv-4-14b-pile, rwkv-raven-1b5",
        "xlstm": "xLSTM-7b",
        "zamba": "Zamba-7B-v1",
        "zamba2": "Zamba2-1.2B, Zamba2-2.7B, Zamba2-7B",
    },
    "Before 2024": {
        "biogpt": "biogpt, BioGPT-Large",
        "bloom": "bloom-560m to bloom-7b1, bloom, bloomz-7b1",
        "codegen": "codegen-350M-mono to codegen-16B-mono",
        "ctrl": "ctrl",
        "gpt_bigcode": "gpt_bigcode-santacoder, starcoder, starcoderbase-1b",
        "gpt_neo": "gpt-neo-125m, gpt-neo-1.3B, gpt-neo-2.7B",
        "gpt_neox": "gpt-neox-20b, pythia-70m to pythia-12b, dolly-v2-3b, RedPajama-INCITE-7B",
        "gpt_neox_japanese": "gpt-neox-japanese-2.7b",
        "gptj": "gpt-j-6B",
        "mpt": "mpt-7b, mpt-30b",
        "opt": "opt-125m to opt-66b",
        "persimmon": "persimmon-8b-base",
        "xglm": "xglm-564M to xglm-7.5B",
    },
}

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
    **dict.fromkeys(
        [
            "bart",
            "bert",
            "bert-generation",
            "big_bird",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "marian",
            "mbart",
            "megatron-bert",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "trocr",
            "whisper",
            "xlm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xlnet",
            "xmod",
        ],
        ENCODER,
    ),
}


def published(model_type: str) -> str:
    return next((models[model_type] for models in FAMILIES.values() if model_type in models), "")


def tiny_config(model_type: str):
    """The tiny config of an architecture, with the layers of its published models."""
    # not at the top: `import_libraries` sets the environment first
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    return shrink(config, **OVERRIDES.get(model_type, {}))


def zoo_names() -> list[str]:
    """Every architecture that transformers' table of causal language models holds, in the order of the page."""
    # not at the top: `import_libraries` sets the environment first
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    known = [name for models in FAMILIES.values() for name in models if name in classes and name not in SKIPPED]
    return known + [name for name in classes if name not in known and name not in SKIPPED]

"""Folders of tiny random models of images and text, each with tokenizer, template and processor files, and rows for them."""

import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}
{%- else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}
{%- endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LISTS_ONLY = CHATML.replace("{% if m.content is string %}{{ m.content }}\n{%- else %}", "").replace(
    "{%- endif %}{{ '<|im_end|>", "{{ '<|im_end|>"
)
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_channels": 3}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
QWEN_IDS = {"image_token_id": "image_token", "video_token_id": "video_token"}
QWEN_IDS |= {"vision_start_token_id": "vision_start_token", "vision_end_token_id": "vision_end_token"}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}  # fmt: skip
QWEN_VISION = {
    **VISION, "depth": 2, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SMOL_TOKENS = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}  # fmt: skip
SMOL_IMAGES = {
    "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True,
    "resample": 3,
}  # fmt: skip
SIGLIP = {**VISION, **LAYERS, "image_size": 16, "patch_size": 4, "vision_use_head": False}

# kind -> (config class, its values, tokens of the tokenizer, ids in the config, processor files, mark in the template)
KINDS = {
    "qwen3_vl": {
        "config": "Qwen3VLConfig", "text": {**TEXT, "rope_parameters": MROPE},
        "vision": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, "tokens": QWEN_TOKENS, "ids": QWEN_IDS,
        "images": QWEN_IMAGES, "mark": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen3_5": {
        "config": "Qwen3_5Config",
        "text": {
            **TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "vision": QWEN_VISION, "tokens": QWEN_TOKENS, "ids": QWEN_IDS,
        "images": QWEN_IMAGES, "mark": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "gemma3": {
        "config": "Gemma3Config", "text": {**TEXT, **WINDOW, "query_pre_attn_scalar": 8}, "vision": SIGLIP,
        "values": {"mm_tokens_per_image": 4}, "tokens": GEMMA_TOKENS,
        "ids": {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        "images": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        "processor": {"image_seq_length": 4}, "mark": "<start_of_image>",
    },
    "gemma4": {
        "config": "Gemma4Config",
        "text": {
            **TEXT, **WINDOW, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
            "use_bidirectional_attention": "vision", "initializer_range": 0.05,
        },
        "vision": {
            **VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
            "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
        },
        "values": {"audio_config": None}, "tokens": {**GEMMA_TOKENS, "boa_token": "<boa>", "eoa_token": "<eoa>"},
        "ids": {"image_token_id": "image_token", "boi_token_id": "boi_token", "eoi_token_id": "eoi_token"},
        "images": {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        "mark": "<image_soft_token>",
    },
    "mistral3": {
        "config": "Mistral3Config", "text": {**TEXT, "model_type": "ministral3"},
        "vision": {**VISION, **LAYERS, "head_dim": 8, "image_size": 32, "patch_size": 4, "model_type": "pixtral"},
        "tokens": {"image_token": "[IMG]", "break_token": "[IMG_BREAK]", "end_token": "[IMG_END]"},
        "ids": {"image_token_index": "image_token"},
        "images": {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
        "processor": {"patch_size": 4, "spatial_merge_size": 2}, "mark": "[IMG]",
    },
    "smolvlm": {
        "config": "SmolVLMConfig", "text": {**TEXT, "model_type": "llama"}, "vision": SIGLIP,
        "tokens": SMOL_TOKENS, "ids": {"image_token_id": "image_token"}, "template": LISTS_ONLY,
        "images": {"image_processor_type": "SmolVLMImageProcessor", **SMOL_IMAGES},
        "processor": {"image_seq_len": 4}, "mark": "<image>",
    },
    "idefics3": {
        "config": "Idefics3Config", "text": {**TEXT, "model_type": "llama"}, "vision": SIGLIP,
        "tokens": SMOL_TOKENS, "ids": {"image_token_id": "image_token"},
        "images": {"image_processor_type": "Idefics3ImageProcessor", **SMOL_IMAGES},
        "processor": {"image_seq_len": 4}, "mark": "<image>",
    },
}  # fmt: skip
QWEN3_VL, QWEN3_5 = KINDS["qwen3_vl"], KINDS["qwen3_5"]
IN_BLOCKS = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
QWEN2_VISION = {"depth": 2, "num_heads": 4, "patch_size": 4, "initializer_range": 0.2, "hidden_size": 32}
WINDOWS = {"intermediate_size": 48, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
KINDS |= {
    "qwen3_vl_moe": {**QWEN3_VL, "config": "Qwen3VLMoeConfig", "text": {**QWEN3_VL["text"], **EXPERTS}},
    "qwen3_5_moe": {**QWEN3_5, "config": "Qwen3_5MoeConfig", "text": {**QWEN3_5["text"], **EXPERTS}},
    "qwen2_vl": {
        **QWEN3_VL, "config": "Qwen2VLConfig", "text": IN_BLOCKS,
        "vision": {**QWEN2_VISION, "embed_dim": 32, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        **QWEN3_VL, "config": "Qwen2_5_VLConfig", "text": IN_BLOCKS, "vision": {**QWEN2_VISION, **WINDOWS},
    },
}  # fmt: skip


def make_folder(kind: str, folder: Path) -> str:
    """Write a model of `kind`: every weight is random, also norms and biases. Returns the folder's path."""
    spec = KINDS[kind]
    tokenizer = make_tokenizer(spec)
    tokenizer.save_pretrained(folder)
    config_class = getattr(transformers, spec["config"])
    ids = {name: tokenizer.convert_tokens_to_ids(spec["tokens"][token]) for name, token in spec["ids"].items()}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    text = {**spec["text"], "vocab_size": 320, **special}
    config = config_class(text_config=text, vision_config=spec["vision"], **ids, **spec.get("values", {}))
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = kind.startswith("gemma")
    config.image_token_id = next(iter(ids.values()))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(spec["images"]))
    if "processor" in spec:
        (folder / "processor_config.json").write_text(json.dumps(spec["processor"]))
    return str(folder)


def make_tokenizer(spec: dict) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of the kind."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, **special, extra_special_tokens=dict(spec["tokens"])
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = spec.get("template", CHATML).replace("IMAGE", spec["mark"])
    return tokenizer


def drawn(number: int, size: tuple[int, int]) -> Image.Image:
    """An image of noise with smooth parts, from its number."""
    generator = torch.Generator().manual_seed(number)
    small = torch.randint(0, 256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(small.numpy()).resize(size, Image.Resampling.BICUBIC)


def make_rows(folder: Path) -> list[dict]:
    """Rows with no, one and several images of different sizes. The images are files in `folder`/pictures."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    sizes = [(24, 16), (16, 16), (40, 12), (20, 32), (16, 24)]
    for number, size in enumerate(sizes):
        drawn(number, size).save(folder / "pictures" / f"{number}.png")
    names = [f"pictures/{number}.png" for number in range(5)]
    image = {"type": "image"}

    def part(text: str) -> dict:
        return {"type": "text", "text": text}

    def row(question, answer: str, images) -> dict:
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": talk, "images": images}

    return [
        row([image, part("What is it?")], "A cloud.", names[:1]),
        row("No image here.", "None at all.", []),
        row("<image>and <image> differ?", "Yes.", names[1:3]),
        row([part("Look: "), image, part(" then"), image, part("!"), image], "Three.", names[2:5]),
        row("Another text.", "Fine.", None),
        row("Before<image>", "After it.", str(folder / names[4])),
        row("Only text, once more, and longer than others.", "So it is.", []),
        row([part("Which?"), image], "The last one.", [names[3]]),
    ]


def write_rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    # a column of JSON Lines has one type: a single path is a list of one
    rows = [
        {**row, "images": [row["images"]] if isinstance(row["images"], str) else row["images"]}
        for row in make_rows(folder)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_pairs(folder: Path) -> str:
    """The rows with a second, worse answer to each prompt. Both answers share the prompt's images."""
    rows = [json.loads(line) for line in Path(write_rows(folder)).read_text().splitlines()]
    worse = ["No.", "A red house, or two of them.", "Maybe.", "What?", "Nothing", "It is not.", "Hm, yes!", "The first"]
    pairs = [
        {
            "prompt": row["messages"][:-1],
            "chosen": row["messages"][-1]["content"],
            "rejected": answer,
            "images": row["images"],
        }
        for row, answer in zip(rows, worse, strict=True)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)

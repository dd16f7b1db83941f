"""Write a demo with images from code and a seed: a tiny model like Qwen3-VL, its processor, and pictures of digits.

The task is to read one to three digits, left to right: a picture of "7 3 9" -> "7 3 9". The model has never seen an
image or a text. Held-out pictures show numbers that no training picture shows.
"""

import json
import os
import random
import shutil
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from trainer.datasets.demos.demo import CHAT_TEMPLATE, END_TOKEN, PAD_TOKEN, START_TOKEN
from trainer.errors import UserError

GENERATOR_VERSION = 2  # raise this if the same seed would give other bytes
NUM_ROWS = {"train": 3000, "eval": 200}
NUM_HELD_OUT = 100  # of the 1110 numbers with one to three digits; those of one digit are all trained
CELL = 16  # pixels of a digit's cell, in width and height: one image token
QUESTION = "Which digits?"
IMAGE_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
IMAGE_TEMPLATE = (
    "{{ message['content'] if message['content'] is string else '' }}"
    "{% if message['content'] is not string %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' }}"
)
TEXT_SHAPE = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}  # fmt: skip
VISION_SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4, "patch_size": 8, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "initializer_range": 0.1,
}  # fmt: skip
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": CELL * CELL, "longest_edge": 16 * CELL * CELL}, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


def make_vision_demo(output_dir: str, seed: int = 0) -> None:
    """Write `model`, `train.jsonl`, `eval.jsonl` and their pictures into `output_dir`.

    `prompts.jsonl` and `prompts_eval.jsonl` are the same rows for train_ppo: without an answer, with a label.

    A folder that already holds this demo is not changed. Raises: UserError if the folder holds anything else.
    """
    target, facts = Path(output_dir).resolve(), {"generator_version": GENERATOR_VERSION, "seed": seed}
    if target.exists() and any(target.iterdir()):
        note = target / "demo.json"
        if note.exists() and json.loads(note.read_text()) == facts:
            return
        raise UserError(str(output_dir), "holds something else", "an empty or new folder")
    unfinished = target.with_name(target.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "pictures").mkdir(parents=True)
    for split, rows in make_rows(unfinished, seed).items():
        (unfinished / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        asked = [{**row, "messages": row["messages"][:1], "label": row["messages"][1]["content"]} for row in rows]
        name = "prompts.jsonl" if split == "train" else f"prompts_{split}.jsonl"
        (unfinished / name).write_text("".join(json.dumps(row) + "\n" for row in asked))
    write_model(unfinished / "model", seed)
    (unfinished / "demo.json").write_text(json.dumps(facts))
    if target.exists():
        target.rmdir()
    os.replace(unfinished, target)


def make_rows(folder: Path, seed: int) -> dict[str, list[dict]]:
    """Rows by split, with their pictures in `folder`/pictures."""
    draw = random.Random(seed)
    numbers = [f"{number:0{length}}" for length in (1, 2, 3) for number in range(10**length)]
    held_out = set(draw.sample(numbers[10:], NUM_HELD_OUT))
    splits = {}
    for split, num_rows in NUM_ROWS.items():
        pool = sorted(held_out if split == "eval" else set(numbers) - held_out)
        by_length = [[number for number in pool if len(number) == length] for length in (1, 2, 3)]
        splits[split] = []
        for row in range(num_rows):
            digits = draw.choice(draw.choice([choice for choice in by_length if choice]))
            name = f"pictures/{split}_{row}.png"
            drawn(digits, draw).save(folder / name)
            content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
            answer = {"role": "assistant", "content": " ".join(digits)}
            splits[split].append({"messages": [{"role": "user", "content": content}, answer], "images": [name]})
    return splits


def drawn(digits: str, draw: random.Random):
    """A picture of the digits, each in its own cell: dark on bright, of changing place and shade."""
    paper, ink, font = draw.randint(220, 255), draw.randint(0, 40), ImageFont.load_default(15)
    image = Image.new("RGB", (CELL * len(digits), CELL), (paper, paper, paper))
    pen = ImageDraw.Draw(image)
    for place, digit in enumerate(digits):
        corner = (CELL * place + draw.randint(3, 5), draw.randint(-2, 0))
        pen.text(corner, digit, fill=(ink, ink, ink), font=font)
    return image


def write_model(folder: Path, seed: int) -> None:
    """Save the tokenizer, the image processor and a randomly initialised Qwen3-VL in fp32."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token per byte
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = {"pad_token": PAD_TOKEN, "eos_token": END_TOKEN, "extra_special_tokens": IMAGE_TOKENS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": [START_TOKEN]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{% else %}{{ message['content'] + '<|im_end|>' }}", "{% else %}" + IMAGE_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in IMAGE_TOKENS.items()}
    stop = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    vocab_size = -(-len(tokenizer) // 8) * 8  # padded up, so that tp of 2, 4 and 8 divides it
    text = {**TEXT_SHAPE, **stop, "vocab_size": vocab_size}
    config = Qwen3VLConfig(text_config=text, vision_config=VISION_SHAPE, dtype="float32", **ids)
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(**stop)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2))

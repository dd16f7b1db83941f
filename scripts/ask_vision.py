"""Let a saved model answer rows with images: `python scripts/ask_vision.py MODEL rows.jsonl [COUNT]`.

Prints three answers, and how many are exactly the row's own answer.
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer.datasets.images.image_processor import load_processor

logging.disable_progress_bar()
folder, data, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 200
tokenizer = AutoTokenizer.from_pretrained(folder)
processor = load_processor(folder, tokenizer)  # as AutoProcessor, without the video part that needs torchvision
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
rows = [json.loads(line) for line in data.read_text().splitlines()][:count]
num_right = 0
for number, row in enumerate(rows):
    *question, answer = row["messages"]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    images = [Image.open(data.parent / name).convert("RGB") for name in row["images"]]
    inputs = processor(text=[text], images=images, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    found = tokenizer.decode(tokens, skip_special_tokens=True)
    num_right += found == answer["content"]
    if number < 3:
        print(f"{row['images'][0]} -> {found}  (right: {answer['content']})")
print(f"{num_right} of {len(rows)} answers are right: {100 * num_right / len(rows):.1f} %")

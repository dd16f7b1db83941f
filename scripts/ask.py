"""Ask a saved chat model the first questions of a prompt file: `python scripts/ask.py MODEL prompts.jsonl [COUNT]`."""

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()
folder, prompts, count = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 3
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
with open(prompts) as file:
    rows = [json.loads(line) for line in file][:count]
for row in rows:
    inputs = tokenizer.apply_chat_template(
        row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    print(
        f"{row['messages'][-1]['content']} -> {tokenizer.decode(answer, skip_special_tokens=True)}  "
        f"(right: {row['label']})"
    )

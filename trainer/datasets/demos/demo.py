"""Write a demo from code and a seed: a tiny Qwen3 model, its tokenizer, and data sets for SFT, DPO/RM and PPO.

The task is to sort a list of digits: "Sort these digits: 7 3 9 1" -> "1 3 7 9". The model has never seen text, so
everything that it knows after a run comes from the run. Every answer can be checked by exact match.
"""

import json
import os
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer.errors import UserError

# Raise this number if the same seed would give other bytes: an older folder must not be used as a newer one.
GENERATOR_VERSION = 1

NUM_ROWS = {"sft": 4000, "sft_eval": 200, "pairs": 2000, "pairs_eval": 200, "prompts": 2000, "prompts_eval": 200}
# Mixed lengths: short lists are soon right, long ones stay wrong for hundreds of steps. So RL always has a signal.
MIN_DIGITS, MAX_DIGITS = 4, 12

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOKENIZER_VOCAB_SIZE = 320  # an upper bound: the demo has so few words that all become tokens earlier

# <|im_end|> is inside the generation block: a model that is never trained on its stop token never stops.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODEL_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,  # 8 query heads on 4 key-value heads: grouped attention, divisible by tp or sp of 4
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def make_demo(output_dir: str, seed: int = 0) -> dict:
    """Write the demo into `output_dir` and return its facts (the content of demo.json).

    The same seed gives the same bytes. A folder that already holds this demo is not changed. The folder gets its name
    only when it is complete.

    Raises: UserError if the folder holds anything else.
    """
    target = Path(output_dir).resolve()
    facts = _facts(seed)
    if _holds_demo(target, facts):
        return json.loads((target / "demo.json").read_text())

    unfinished = target.with_name(target.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    row_sets = _make_rows(seed)
    for name, rows in row_sets.items():
        _write_jsonl(unfinished / f"{name}.jsonl", rows)
    facts["tokenizer_vocab_size"] = _write_tokenizer(unfinished / "model", row_sets["sft"])
    facts["model_vocab_size"], facts["num_parameters"] = _write_model(unfinished / "model", seed)
    _write_json(unfinished / "demo.json", facts)
    os.replace(unfinished, target)
    return facts


def _facts(seed: int) -> dict:
    return {
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        "task": f"sort {MIN_DIGITS} to {MAX_DIGITS} digits in ascending order",
        "example": {"prompt": prompt_text([7, 3, 9, 1]), "answer": answer_text([7, 3, 9, 1])},
        "num_rows": NUM_ROWS,
        "model_shape": MODEL_SHAPE,
    }


def _holds_demo(target: Path, facts: dict) -> bool:
    """Whether `target` holds the demo of these facts. False if it is missing or empty; else raises UserError."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    allowed = "a new folder, an empty one, or one that already holds this demo"
    if not (target / "demo.json").is_file():
        raise UserError(str(target), "exists and is not a demo folder", allowed)
    found = json.loads((target / "demo.json").read_text())
    for key in ("seed", "generator_version"):
        if found.get(key) != facts[key]:
            raise UserError(str(target), f"holds a demo of {key} {found.get(key)}, not {facts[key]}", allowed)
    return True


# --- rows ---


def prompt_text(digits: list[int]) -> str:
    return "Sort these digits: " + " ".join(map(str, digits))


def answer_text(digits: list[int]) -> str:
    return " ".join(map(str, sorted(digits)))


def _make_rows(seed: int) -> dict[str, list[dict]]:
    """Make all sets, by name. No prompt occurs twice, not even in two different sets."""
    rng = random.Random(seed)
    lists = iter(_unique_lists(rng, sum(NUM_ROWS.values())))
    row_sets = {}
    for name, num_rows in NUM_ROWS.items():
        make_row = {"sft": _sft_row, "pairs": _pair_row, "prompts": _prompt_row}[name.removesuffix("_eval")]
        row_sets[name] = [make_row(next(lists), rng) for _ in range(num_rows)]
    return row_sets


def _unique_lists(rng: random.Random, num_lists: int) -> list[list[int]]:
    unique = {}  # a dict, not a set: it keeps the order
    while len(unique) < num_lists:
        length = rng.randint(MIN_DIGITS, MAX_DIGITS)
        unique[tuple(rng.randint(0, 9) for _ in range(length))] = None
    return [list(digits) for digits in unique]


def _sft_row(digits: list[int], rng: random.Random) -> dict:
    return {"messages": [_user(digits), _assistant(answer_text(digits))]}


def _pair_row(digits: list[int], rng: random.Random) -> dict:
    return {
        "prompt": [_user(digits)],
        "chosen": [_assistant(answer_text(digits))],
        "rejected": [_assistant(_wrong_answer(digits, rng))],
    }


def _prompt_row(digits: list[int], rng: random.Random) -> dict:
    return {"messages": [_user(digits)], "label": answer_text(digits)}


def _wrong_answer(digits: list[int], rng: random.Random) -> str:
    """Make a wrong answer of the right length, like a half-trained model: digits swapped, or one digit wrong."""
    right = sorted(digits)
    wrong = list(right)
    while wrong == right:
        i, j = rng.sample(range(len(right)), 2)
        if rng.random() < 0.5:
            wrong[i], wrong[j] = wrong[j], wrong[i]
        else:
            wrong[i] = rng.randint(0, 9)
    return " ".join(map(str, wrong))


def _user(digits: list[int]) -> dict:
    return {"role": "user", "content": prompt_text(digits)}


def _assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


# --- files ---


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_tokenizer(folder: Path, rows: list[dict]) -> int:
    """Train a byte-level BPE on the text of the rows. Save it with the chat template. Returns the vocabulary size."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE,
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: any text can be encoded
        show_progress=False,
    )
    texts = (text for row in rows for message in row["messages"] for text in (message["role"], message["content"]))
    bpe.train_from_iterator(texts, bpe_trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        model_max_length=MODEL_SHAPE["max_position_embeddings"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _write_model(folder: Path, seed: int) -> tuple[int, int]:
    """Save a randomly initialised Qwen3 in fp32. Returns (its vocabulary size, its number of parameters)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab_size = -(-len(tokenizer) // 8) * 8  # padded up, so that tp of 2, 4 and 8 divides it
    token_ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=vocab_size, dtype="float32", **MODEL_SHAPE, **token_ids)
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(**token_ids)
    model.save_pretrained(folder)
    return vocab_size, model.num_parameters()

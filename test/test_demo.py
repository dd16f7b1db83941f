"""The demo is the same bytes for the same seed, and what it promises about its model, tokenizer and rows holds."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.datasets.demos.demo import make_demo
from trainer.datasets.demos.demo_flags import SFT_DEFAULTS
from trainer.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
SEED = 3
SET_NAMES = ["sft", "sft_eval", "pairs", "pairs_eval", "prompts", "prompts_eval"]

# Another process, with another hash seed, and with a check that the demo's flags do not import torch.
GENERATE_AGAIN = """
import sys
import trainer.datasets.demos.demo_flags
assert not {"torch", "transformers", "tokenizers"} & set(sys.modules)
from trainer.datasets.demos.demo import make_demo
make_demo(sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "first"
    make_demo(str(folder), SEED)
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo / "model")


@pytest.fixture(scope="module")
def rows(demo) -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in (demo / f"{name}.jsonl").open()] for name in SET_NAMES}


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prompt_of(row: dict) -> str:
    messages = row.get("prompt") or row["messages"]
    assert messages[0]["role"] == "user"
    return messages[0]["content"]


def right_answer(prompt: str) -> str:
    """An independent sort: count each digit, write them in order."""
    digits = prompt.removeprefix("Sort these digits: ").split(" ")
    return " ".join(digit for digit in "0123456789" for _ in range(digits.count(digit)))


def test_same_seed_gives_the_same_bytes_in_another_process(demo, tmp_path):
    again = tmp_path / "nested" / "again"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(REPOSITORY), "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GENERATE_AGAIN, str(again), str(SEED)]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    first, second = all_files(demo), all_files(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_finished_demo_is_left_alone_and_nothing_else_is_overwritten(demo, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("*")}
    assert make_demo(str(demo) + "/", SEED) == json.loads((demo / "demo.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in demo.rglob("*")} == before
    assert not demo.with_name("first.tmp").exists()
    with pytest.raises(UserError, match=f"seed {SEED}, not {SEED + 1}"):
        make_demo(str(demo), SEED + 1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a demo folder"):
        make_demo(str(tmp_path), SEED)


def test_tokenizer_round_trips_any_text(tokenizer):
    all_lengths = (
        "".join(chr(code) for code in range(0x250))
        + "\u0915\u094d\u0937 \u4f60\u597d \U0001f642\U0001f9d1\u200d\U0001f680"
    )
    for text in ["", " ", "  two  spaces ", "a\n\n\tb\r\n", "don 't , . !", "<|im_end|> inside", all_lengths]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_assistant_mask_is_the_answer_and_its_stop_token(tokenizer, rows):
    for row in [*rows["sft"][:50], {"messages": rows["sft"][0]["messages"] + rows["sft"][1]["messages"]}]:
        encoded = tokenizer.apply_chat_template(row["messages"], return_assistant_tokens_mask=True, return_dict=True)
        trained = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert tokenizer.decode(trained) == "".join(answer + "<|im_end|>" for answer in answers)


def test_generation_prompt_is_the_text_before_the_answer(tokenizer, rows):
    question, answer = rows["sft"][0]["messages"]
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([question, answer], tokenize=False)
    assert whole == prompt + answer["content"] + "<|im_end|>\n"
    ids = tokenizer.encode(prompt), tokenizer.encode(whole)
    assert ids[1][: len(ids[0])] == ids[0]


def test_no_prompt_appears_twice(rows):
    prompts = [prompt_of(row) for set_rows in rows.values() for row in set_rows]
    assert len(set(prompts)) == len(prompts)


def test_labels_are_right_and_rejected_answers_are_wrong(rows):
    for row in rows["sft"] + rows["sft_eval"]:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1]["content"] == right_answer(prompt_of(row))
    for row in rows["prompts"] + rows["prompts_eval"]:
        assert row["label"] == right_answer(prompt_of(row))
    for row in rows["pairs"] + rows["pairs_eval"]:
        chosen, rejected = row["chosen"][0], row["rejected"][0]
        assert chosen["role"] == rejected["role"] == "assistant"
        assert chosen["content"] == right_answer(prompt_of(row)) != rejected["content"]
        assert len(chosen["content"]) == len(rejected["content"])


def test_model_loads_and_divides_over_four(demo, tokenizer, rows):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    config = model.config
    assert (config.model_type, config.head_dim) == ("qwen3", 32)
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 4 == config.intermediate_size % 4 == 0
    assert config.vocab_size % 8 == 0 and config.vocab_size >= len(tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids = [tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"] for row in rows["sft"]]
    assert max(map(len, ids)) <= SFT_DEFAULTS["max_len"] <= config.max_position_embeddings
    assert torch.isfinite(model(torch.tensor(ids[:1])).logits).all()


def test_facts_count_what_is_there(demo, tokenizer, rows):
    facts = json.loads((demo / "demo.json").read_text())
    assert facts["seed"] == SEED
    assert facts["num_rows"] == {name: len(set_rows) for name, set_rows in rows.items()}
    assert facts["tokenizer_vocab_size"] == len(tokenizer)


def test_orders_of_the_real_demo_have_checkable_answers(tmp_path):
    script = REPOSITORY / "scripts" / "orders_task.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    lines = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "prompts", "test")}
    sets = {name: [json.loads(line) for line in rows] for name, rows in lines.items()}
    assert [len(rows) for rows in sets.values()] == [640, 256, 64]
    orders = [row["messages"][0]["content"] for rows in sets.values() for row in rows]
    assert len(set(orders)) == len(orders)  # no order is in two files
    answers = [row["messages"][1]["content"] for row in sets["train"]] + [row["label"] for row in sets["test"]]
    asked = [row["messages"][0]["content"] for row in sets["train"] + sets["test"]]
    assert all(str(value) in text for text, label in zip(asked, answers) for value in json.loads(label).values())

    reward_func = runpy.run_path(str(script))["reward_func"]
    label = '{"name": "A", "city": "B", "item": "c", "count": 2, "date": "1 May"}'
    scores = {
        label: 1.0,
        label.replace(" ", ""): 0.8,  # the date lacks its space
        '{"name": "A", "count": "2"}': 0.2,
        label[:-1] + ', "more": 1}': 0.0,
        "[1]": 0.0,
        "The name is A.": 0.0,
    }
    assert reward_func(None, list(scores), [label] * len(scores)) == pytest.approx(list(scores.values()))

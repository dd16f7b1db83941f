"""The environments for search and code of docs/environments.md: at most 20 lines each, and played with scripted turns."""

import json

import pytest
from conversations import Script, byte_tokenizer, environments, sampling_of
from doc_blocks import read_blocks
from launch import ROOT

from trainer.datasets.samples.prompts import COLUMN
from trainer.rollout.envs.env_process import ProcessEnvironment
from trainer.rollout.envs.environments import Source, load_environment
from trainer.rollout.envs.episodes import continue_episodes

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "capital of France"}}\n</tool_call>'
PAGES = ["Paris is the capital of France", "Rome is the capital of Italy", "Wheat grows in France", "Cats sleep"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    blocks = [block for block in read_blocks(ROOT / "docs/environments.md", "environments.md") if block.mark == "file"]
    for block in blocks:
        (tmp_path / block.note).write_text(block.text)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in PAGES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(make, task: dict, *texts: str):
    """The sample of an episode in which the model writes these texts, and all of it as text."""
    tokenizer = byte_tokenizer("qwen3")
    turns = [tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"] for text in texts]
    prompt = {"row": 0, "label": None, "prompt_ids": [1], **{COLUMN + name: value for name, value in task.items()}}
    sampling = sampling_of(tokenizer, "qwen3", 2000)
    [sample] = continue_episodes(environments(make, tokenizer), Script(turns), [(0, prompt)], sampling, 0, 0)
    return sample, tokenizer.decode(sample.prompt_ids + sample.response_ids)


@pytest.mark.parametrize("name", ["search_env.py", "code_env.py"])
def test_they_have_at_most_twenty_lines(folder, name):
    assert 0 < len([line for line in (folder / name).read_text().splitlines() if line.strip()]) <= 20


def test_search(folder):
    make = load_environment(str(folder / "search_env.py"))
    sample, text = play(make, {"question": "Which city?", "answer": "Paris"}, CALL, "It is Paris.")
    assert sample.score == 1.0 and sample.end == "done" and "Find the three pages" in text
    [(_, answered)] = [text.split("<tool_response>\n")]
    found = json.loads(answered.split("\n</tool_response>")[0])
    assert found[0] == PAGES[0] and len(found) == 3 and "Cats sleep" not in found
    assert play(make, {"question": "Which city?", "answer": "Paris"}, "It is Rome.")[0].score == 0.0


def test_code_in_a_sandbox(folder):
    source = Source(str(folder / "code_env.py"))
    task = {"question": "How much is 2 + 3?", "answer": "5"}
    wrong, right = "```python\nprint(2 + 2)\n```", "First:\n```python\nprint(2 + 3)\n```"
    sample, text = play(lambda: ProcessEnvironment(source, 1024, 30.0), task, wrong, right)
    assert sample.score == 1.0 and len(sample.turns) == 2 and "user\nIt printed:\n4" in text
    assert sample.metrics["lost"] == 0


def test_notes_replace_the_conversation(folder):
    """Each turn reads the question and the notes of earlier turns, and nothing else."""
    sample, text = play(load_environment(str(folder / "notes_env.py")), {}, "one", "two", "three", "done")
    assert sample.score == 1.0 and len(sample.turns) == 4 and len(sample.starts) == 3
    *_, newest = text.split("<|im_start|>user\nSolve")
    assert "Your notes so far: one\ntwo\nthree\n" in newest and text.count("<|im_start|>assistant") == 4

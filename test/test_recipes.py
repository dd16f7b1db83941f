"""Recipes of other trainers: each key has an answer, and what a person makes of the answers passes the command's own check."""

import importlib
import importlib.util
import json
import shlex

import pytest
import yaml
from launch import ROOT
from test_peer_names import FLAGS, named, refused

from trainer.datasets.demos.demo import make_demo
from trainer.runs import flag_checks

RECIPES = yaml.safe_load((ROOT / "test" / "recipes" / "recipes.yaml").read_text())
# keys that the table lacks on purpose: they say how many machines a role gets, or repeat a setting for log-probs
NAMELESS = {"ref_num_nodes", "eos_token", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"}
MODELS = ("--pretrain", "--reward_pretrain", "--critic_pretrain")
ROWS = {"train_sft": "sft.jsonl", "train_dpo": "pairs.jsonl", "train_ppo": "prompts.jsonl"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, with a model of as many positions as those of the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    make_demo(str(folder / "demo"))
    config = folder / "demo/model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 131072}))
    (folder / "rewards.py").write_text(
        "def format_reward(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    (folder / "demo/verl.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def local(words: list[str], rows: str) -> list[str]:
    """The words of a command line, with files of the demo in place of models and data."""
    here = dict.fromkeys(MODELS, "demo/model") | {"--dataset": f"demo/{rows}"}
    here["--eval_dataset"] = here["--dataset"]
    places = [words[place - 1] if place else "" for place in range(len(words))]
    return [here.get(before, word) for before, word in zip(places, words)]


def answers_to(recipe: dict, folder) -> dict[str, str]:
    """{key of another trainer: our answer to it}."""
    config = folder / "recipe.yaml"
    config.write_text(yaml.dump(recipe["settings"]))
    found = refused(recipe["command"], "--config", str(config))
    return dict(pair.split(" -> ", 1) for pair in found.split(": ", 2)[2].split(" | "))


def is_loss(answer: str, given: set[str]) -> bool:
    """Whether an answer leaves nothing of a key in the flags `given`, and does not say that it is so anyway."""
    return "leave it out" not in answer and (answer.startswith("no counterpart") or not named(answer) & given)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_translated_key_by_key(name, tmp_path):
    recipe = RECIPES[name]
    answers, given = answers_to(recipe, tmp_path), named(recipe["ours"])
    assert not [key for key, answer in answers.items() if "see --help" in answer and key not in NAMELESS], answers
    assert given <= {*recipe["settings"], *named(" ".join(answers.values()))}, "a flag that no answer named"

    own = {key for key in recipe["settings"] if key in FLAGS[recipe["command"]]}
    silent = {key for key, answer in answers.items() if is_loss(answer, given)}
    silent |= own - given
    listed = [*recipe.get("same", ()), *recipe.get("lost", ())]
    assert silent == set(listed) and len(listed) == len(set(listed)), "a key that is neither in `ours` nor named"


@pytest.mark.parametrize("name", RECIPES)
def test_the_translation_passes_the_check_of_its_command(name, demo, monkeypatch):
    """As on 8 ranks, with all packages installed. The check reads flags, files and folders, and no torch."""
    command, ours = RECIPES[name]["command"], RECIPES[name]["ours"]
    monkeypatch.chdir(demo)
    monkeypatch.setenv("WORLD_SIZE", "8")
    find_spec = importlib.util.find_spec
    absent = {"vllm", "wandb", "bitsandbytes", "peft", "tensorboard"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name in absent or find_spec(name, *more))
    monkeypatch.setattr(flag_checks, "check_wandb", lambda: None)
    rows = "verl.jsonl" if "(verl)" in name else ROWS[command]
    importlib.import_module(f"trainer.cli.{command}").check(local(shlex.split(ours), rows))


def test_there_are_recipes_of_every_kind():
    assert len(RECIPES) == 20
    assert {recipe["command"] for recipe in RECIPES.values()} == {"train_sft", "train_dpo", "train_ppo"}

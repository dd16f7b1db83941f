"""Adapter folders as reward models, as critics, and as the start of train_rm: scores are those of peft. And by hub name."""

import json

import pytest
import torch
from launch import read_steps, train_many
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_ppo_command import flags, folder, load_scorer, plain_score  # noqa: F401 (folder is a fixture)
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import parse_arguments
from trainer.model_folders.adapter_folder import adapter_here, base_folder
from trainer.models.model_loading import resolve_adapted_model
from trainer.models.reward import lacks_head, make_initial_reward_model
from trainer.rollout.rewards.model_scorer import ModelScorer
from trainer.runs.flag_checks import start_from_adapter

Z3 = ["--backend", "deepspeed", "--zero_stage", "3"]


def write_adapter(model, base, target, task: str) -> None:
    """An adapter of peft whose update and head are not those that it begins with. It names `base`."""
    torch.manual_seed(5)
    model = get_peft_model(
        model, LoraConfig(task_type=task, r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    )
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        torch.nn.init.normal_(parameter, std=0.05)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)


@pytest.fixture(scope="module")
def models(folder):  # noqa: F811
    """rm: a whole reward model. adapter: one of peft, which names a base without a head. whole: the two merged by peft."""
    base = folder / "demo/model"
    make_initial_reward_model(str(base), str(folder / "rm"), seed=3)
    write_adapter(load_scorer(folder / "rm"), base, folder / "adapter", "SEQ_CLS")
    merged = PeftModel.from_pretrained(load_scorer(folder / "rm"), folder / "adapter").merge_and_unload()
    merged.save_pretrained(folder / "whole")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "whole")
    return folder


def rm_line(models, pretrain: str) -> list[str]:
    line = ["train_rm", "--pretrain", f"{models}/{pretrain}", "--dataset", f"{models}/demo/pairs.jsonl"]
    line += ["--apply_chat_template", "--max_samples", "8", "--train_batch_size", "8", "--micro_train_batch_size", "4"]
    return [*line, "--param_dtype", "fp32", "--max_steps", "1", "--no_save", "--output_dir", f"{models}/rm-{pretrain}"]


@pytest.fixture(scope="module")
def runs(models):
    lines = []
    for name, layout in (("scores", []), ("scores-z3", Z3)):
        line = flags(models, name, "--advantage_estimator", "dr_grpo", "--max_steps", "1", *layout)
        at = line.index("--reward_func")
        line[at : at + 2] = ["--reward_pretrain", f"{models}/rm, {models}/adapter", "--reward_weights", "1", "0.5"]
        lines.append(["train_ppo", *line])
    for name in ("adapter", "whole"):
        gae = ["--advantage_estimator", "gae", "--critic_pretrain", f"{models}/{name}", "--max_steps", "2"]
        lines += [["train_ppo", *flags(models, f"critic-{name}", *gae)], rm_line(models, name)]
    train_many(2, lines, models, timeout=300)
    return models


@pytest.mark.parametrize("name", ["scores", "scores-z3"])
def test_scores_of_a_reward_adapter_are_those_of_peft(runs, name):
    """Beside a whole reward model, with weights 1 and 0.5. The base model that the adapter names has no head."""
    plain = load_scorer(runs / "rm")
    adapted = PeftModel.from_pretrained(load_scorer(runs / "rm"), runs / "adapter").eval()
    rows = [json.loads(line) for line in (runs / name / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        ids = row["prompt_ids"] + row["response_ids"]
        first, second = plain_score(plain, ids), plain_score(adapted, ids)
        assert row["score"] == pytest.approx(first + 0.5 * second, rel=1e-5, abs=1e-5) and abs(first - second) > 1e-3
    assert len(rows) == 8


def test_a_critic_and_train_rm_begin_with_what_peft_merges(runs):
    """Both steps of a critic that trains whole weights. Of train_rm the first: then only the adapter trains."""
    steps = {name: read_steps(runs / name) for name in ("critic-adapter", "critic-whole", "rm-adapter", "rm-whole")}
    for key in ("value_loss", "critic_grad_norm"):
        whole = [row[key] for row in steps["critic-whole"]]
        assert [row[key] for row in steps["critic-adapter"]] == pytest.approx(whole, rel=1e-5) and len(whole) == 2
    assert steps["critic-whole"][0]["value_loss"] > 0
    [adapter], [whole] = steps["rm-adapter"], steps["rm-whole"]
    assert adapter["loss"] == pytest.approx(whole["loss"], rel=1e-5) and adapter["loss"] != pytest.approx(
        0.693, abs=1e-3
    )
    assert 0 < adapter["grad_norm"] < whole["grad_norm"]


def test_what_no_score_can_be_read_from_is_one_line(models, tmp_path):
    """An adapter of a language model; one whose base is not here, with the command that cures it."""
    base = str(models / "demo/model")
    write_adapter(AutoModelForCausalLM.from_pretrained(base), base, tmp_path / "policy", "CAUSAL_LM")
    assert not lacks_head(str(models / "rm"), str(tmp_path / "policy"), "--reward_pretrain")
    assert lacks_head(base, str(models / "adapter"), "--reward_pretrain")
    with pytest.raises(
        UserError, match=r"model is no reward model: it has no score.weight \(allowed: a model that train_rm"
    ):
        ModelScorer(base, dtype=torch.float32)
    with pytest.raises(UserError, match=r"--reward_pretrain: .*policy has no score.weight, and neither has its base"):
        lacks_head(base, str(tmp_path / "policy"), "--reward_pretrain")
    config = json.loads((tmp_path / "policy/adapter_config.json").read_text()) | {"base_model_name_or_path": "gone"}
    (tmp_path / "policy/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the base model gone.*export .*policy MODEL --base BASE") as found:
        resolve_adapted_model(str(tmp_path / "policy"), "--critic_pretrain")
    assert "\n" not in str(found.value)


def test_an_adapter_and_its_base_are_found_by_their_hub_names_in_the_cache(models, tmp_path, monkeypatch):
    """As model folders are: without the network, whose use a file could not grant."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, source in (("me/adapter", "adapter"), ("me/base", "demo/model")):
        cached = tmp_path / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("c0ffee")
        (cached / "snapshots").mkdir()
        (cached / "snapshots/c0ffee").symlink_to(models / source)
    adapter, base = (str(tmp_path / f"models--me--{name}/snapshots/c0ffee") for name in ("adapter", "base"))
    assert (adapter_here("me/adapter"), adapter_here("me/base"), adapter_here(None)) == (adapter, "me/base", None)
    assert [adapter_here(name) for name in ("a/b/c", "no such", "./x", "")] == ["a/b/c", "no such", "./x", ""]
    config = json.loads((models / "adapter/adapter_config.json").read_text())
    own = tmp_path / "own"
    own.mkdir()
    (own / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "me/base"}))
    save_file(load_file(models / "adapter/adapter_model.safetensors"), own / "adapter_model.safetensors")
    assert base_folder(str(own), "--pretrain") == base
    args = parse_arguments(SFTArguments, "train_sft", ["--pretrain", "me/adapter", "--dataset", "d"])
    start_from_adapter(args.model, args.lora)
    assert (args.lora.lora_adapter, args.model.pretrain) == (adapter, str(models / "demo/model"))
    assert args.lora.lora_rank == 4

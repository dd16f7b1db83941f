"""What a run with images refuses is one line before the first step; the demo with images is the same for the same seed."""

import json
from pathlib import Path

import pytest
import vision_models
from transformers import AutoConfig, AutoModelForImageTextToText

from trainer.cli import train_ppo, train_sft
from trainer.datasets.demos import vision_demo
from trainer.errors import UserError
from trainer.flags.rules import refuse
from trainer.models.layers.vision import check_tower
from trainer.runs.features.image_runs import ImageRun

REFUSED = {
    "--expert_parallel_size 2": "--expert_parallel_size 2 with rows that have images",
    "--tensor_parallel_size 2 --sequence_parallel": "--sequence_parallel with rows that have images",
    "--load_in_4bit --lora_rank 2": "--load_in_4bit with rows that have images",
    "--compile": "--compile with rows that have images",
    "--aux_loss_coef 0.1": "--aux_loss_coef 0.1 with rows that have images",
    "--parity_trace x": "--parity_trace x with rows that have images",
    "--lora_rank 2 --freeze_vision false": "--freeze_vision false with --lora_rank",
    "--vision_learning_rate 1e-4": "--vision_learning_rate 0.0001 with a frozen vision tower",
    "--vision_learning_rate 1e-4 --freeze_vision false --optim muon": "--vision_learning_rate 0.0001 with --optim muon",
}


class WithImages:
    column_names = ("input_ids", "images")
    processor = None


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_work_with_images_are_refused(flags):
    args, _ = train_sft.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
    with pytest.raises(UserError) as found:
        refuse("train_sft", args, has_images=True)
    assert str(found.value).startswith(REFUSED[flags])


@pytest.mark.parametrize(
    "flags", ["--freeze_vision false", "--vision_learning_rate 1e-4", "--cache_pixels", "--image_max_pixels 99"]
)
def test_flags_of_the_tower_are_refused_without_images(flags):
    args, _ = train_sft.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
    with pytest.raises(UserError, match="without images: no row has an image"):
        refuse("train_sft", args, no_images=True)


REFUSED_BY_PPO = {
    "--rollout_engine vllm_server": "--rollout_engine vllm_server with rows that have images",
    "--rollout_engine vllm --tensor_parallel_size 2": "--rollout_engine vllm with rows that have images",
    "--advantage_estimator gae": "--dataset d with --advantage_estimator gae: rows have images",
    "--reward_pretrain rm": "--reward_pretrain rm with rows that have images",
    "--ref_model other --init_kl_coef 0.1": "--ref_model other with rows that have images",
    "--env calculator.py:Env": "--env calculator.py:Env with rows that have images",
    "--max_staleness 1": "--max_staleness 1 with rows that have images",
}


@pytest.mark.parametrize("flags", REFUSED_BY_PPO)
def test_flags_of_train_ppo_that_do_not_work_with_images_are_refused(flags):
    estimator = [] if "estimator" in flags else ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2"]
    args, _ = train_ppo.parse(["--pretrain", "m", "--dataset", "d", *estimator, *flags.split()])
    with pytest.raises(UserError) as found:
        refuse("train_ppo", args, has_images=True)
    assert str(found.value).startswith(REFUSED_BY_PPO[flags])


def test_a_reference_of_another_kind_is_refused(tmp_path):
    run = object.__new__(ImageRun)
    run.folder = vision_models.make_folder("qwen3_vl", tmp_path / "own")
    other = vision_models.make_folder("smolvlm", tmp_path / "other")
    run.check_kind(run.folder, "--ref_model")
    with pytest.raises(UserError, match=r"--ref_model: a smolvlm, and rows have images \(allowed: a qwen3_vl"):
        run.check_kind(other, "--ref_model")


def test_packed_and_split_rows_are_refused_where_images_are_seen_both_ways(tmp_path):
    import torch

    for kind in ("gemma3", "gemma4", "qwen3_vl"):
        config = AutoConfig.from_pretrained(vision_models.make_folder(kind, tmp_path / kind))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        check_tower(model, packed=False, sp_size=1, tp_size=2)
        if kind == "qwen3_vl":
            check_tower(model, packed=True, sp_size=2, tp_size=1)
            continue
        with pytest.raises(UserError, match=f"--packing_samples: in {kind}, a token of an image sees later ones"):
            check_tower(model, packed=True, sp_size=1, tp_size=1)
        with pytest.raises(UserError, match=f"--ring_attn_size: in {kind}, a token of an image sees later ones"):
            check_tower(model, packed=False, sp_size=2, tp_size=1)


def test_the_demo_is_the_same_for_the_same_seed_and_holds_numbers_out(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_demo, "NUM_ROWS", {"train": 60, "eval": 20})
    vision_demo.make_vision_demo(str(tmp_path / "one"), seed=3)
    vision_demo.make_vision_demo(str(tmp_path / "two"), seed=3)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len([path for path in files if path.suffix == ".png"]) == 80
    assert all((tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes() for path in files)
    vision_demo.make_vision_demo(str(tmp_path / "one"), seed=3)  # nothing to do
    with pytest.raises(UserError, match="holds something else"):
        vision_demo.make_vision_demo(str(tmp_path / "one"), seed=4)
    answers = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in Path(tmp_path / "one" / f"{split}.jsonl").read_text().splitlines()]
        answers[split] = {row["messages"][1]["content"] for row in rows}
    assert not answers["train"] & answers["eval"]

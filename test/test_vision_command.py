"""What a run with images refuses is one line before the first step; the demo with images is the same for the same seed."""

import json
from pathlib import Path

import pytest
import vision_models
from transformers import AutoConfig, AutoModelForImageTextToText

from trainer.cli import train_dpo, train_sft, training_command
from trainer.cli.image_runs import ImageRun
from trainer.datasets import vision_demo
from trainer.errors import UserError
from trainer.models.vision_tower import check_tower

REFUSED = {
    "--ring_attn_size 2": "--ring_attn_size: with rows that have images",
    "--expert_parallel_size 2": "--expert_parallel_size: with rows that have images",
    "--tensor_parallel_size 2 --sequence_parallel": "--sequence_parallel: with rows that have images",
    "--load_in_4bit --lora_rank 2": "--load_in_4bit: with rows that have images",
    "--compile": "--compile: with rows that have images",
    "--aux_loss_coef 0.1": "--aux_loss_coef: with rows that have images",
    "--parity_trace x": "--parity_trace: with rows that have images",
    "--lora_rank 2 --freeze_vision false": "--freeze_vision: false with --lora_rank",
    "--vision_learning_rate 1e-4": "--vision_learning_rate: with a frozen vision tower",
    "--vision_learning_rate 1e-4 --freeze_vision false --optim muon": "--vision_learning_rate: with --optim muon",
}


class WithImages:
    column_names = ("input_ids", "images")
    processor = None


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_work_with_images_are_refused(flags):
    args, _ = train_sft.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
    with pytest.raises(UserError) as found:
        ImageRun(args, None, WithImages())
    assert str(found.value).startswith(REFUSED[flags])


@pytest.mark.parametrize("flags", ["--freeze_vision false", "--vision_learning_rate 1e-4"])
def test_flags_of_the_tower_are_refused_without_images(flags):
    args, _ = train_sft.parse(["--pretrain", "m", "--dataset", "d", *flags.split()])
    with pytest.raises(UserError, match="would do nothing here: no row has an image"):
        ImageRun(args, None)


def test_other_commands_refuse_rows_with_images(tmp_path):
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c", "images": images} for images in ([], ["x.png"])]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    args, _ = train_dpo.parse(["--pretrain", "m", "--dataset", str(tmp_path / "pairs.jsonl")])
    with pytest.raises(UserError, match=r"--dataset row 2: it has images \(allowed: rows without images; train_sft"):
        training_command.load_text_rows(args, args.dataset, "train", "--dataset")


def test_packing_is_refused_where_images_are_seen_both_ways(tmp_path):
    import torch

    for kind in ("gemma3", "gemma4", "qwen3_vl"):
        config = AutoConfig.from_pretrained(vision_models.make_folder(kind, tmp_path / kind))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
        check_tower(model, packed=False, tp_size=2)
        if kind == "qwen3_vl":
            check_tower(model, packed=True, tp_size=1)
            continue
        with pytest.raises(UserError, match=f"--packing_samples: in {kind}, a token of an image sees later ones"):
            check_tower(model, packed=True, tp_size=1)


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

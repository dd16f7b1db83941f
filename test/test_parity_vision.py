"""Models of images and text train as in a plain loop of transformers: losses, every gradient, weights, and what is saved."""

import json
from pathlib import Path

import pytest
import torch
import vision_models
import vision_reference
from launch import train_many
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

TOWERS = {"qwen3_vl": ("visual.blocks.", "visual.patch_embed.", "visual.pos_embed."), "gemma3": ("vision_tower.",)}
FSDP2, ZERO2, ZERO3 = (
    ["--backend", *words.split()] for words in ("fsdp2", "deepspeed --zero_stage 2", "deepspeed --zero_stage 3")
)
WHOLE = ["--freeze_vision", "false"]
TP, PACKED = ["--tensor_parallel_size", "2"], ["--packing_samples"]
TOWER_LR = 1e-4
# (name of the run, model, flags, what trains). Rank 1 of a run with micro-batches of 1 has some without an image.
RUNS = [
    ("fsdp2", "qwen3_vl", [*FSDP2, *WHOLE, "--micro_train_batch_size", "1"], "all"),
    ("fsdp2", "gemma3", [*FSDP2, *WHOLE, "--micro_train_batch_size", "4"], "all"),
    ("fsdp2", "gemma4", [*FSDP2, *WHOLE], "all"),
    ("fsdp2_packed", "qwen3_5", [*FSDP2, *WHOLE, *PACKED, "--micro_train_batch_size", "1"], "all"),
    ("fsdp2_tp", "mistral3", [*FSDP2, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("zero2", "mistral3", [*ZERO2, *WHOLE, "--micro_train_batch_size", "1"], "all"),
    ("zero2_tp", "qwen3_vl", [*ZERO2, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("zero3_tp", "qwen3_vl_moe", [*ZERO3, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("zero2_packed", "qwen3_vl", [*ZERO2, *WHOLE, *PACKED, "--micro_train_batch_size", "1"], "all"),
    ("zero3", "smolvlm", [*ZERO3, *WHOLE, "--micro_train_batch_size", "4"], "all"),
    ("fsdp2_frozen", "gemma3", [*FSDP2], "frozen"),
    ("zero3_frozen", "qwen3_vl", [*ZERO3], "frozen"),
    ("fsdp2_rate", "gemma3", [*FSDP2, *WHOLE, "--vision_learning_rate", str(TOWER_LR)], "rate"),
    ("fsdp2_lora", "qwen3_vl", [*FSDP2, "--lora_rank", "4"], "lora"),
    ("zero3_lora", "gemma3", [*ZERO3, "--lora_rank", "4"], "lora"),
]
IDS = [f"{name}-{kind}" for name, kind, _, _ in RUNS]
COMMON = "--max_len 512 --train_batch_size 8 --max_steps 2 --learning_rate 1e-3 --lr_scheduler constant --no_shuffle"
COMMON += " --param_dtype fp32 --cpu_matmul mkl --micro_train_batch_size 2"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """All runs have been made, in one launch of 2 ranks; and one of them in bf16 has replayed its steps."""
    folder = tmp_path_factory.mktemp("vision")
    data = vision_models.write_rows(folder)
    for kind in {kind for _, kind, _, _ in RUNS}:
        vision_models.make_folder(kind, folder / kind)
    lines = []
    for (_, kind, flags, _), name in zip(RUNS, IDS, strict=True):
        own = ["--output_dir", str(folder / name), "--parity_dump", str(folder / name / "dump")]
        lines.append(["--pretrain", str(folder / kind), "--dataset", data, *COMMON.split(), *flags, *own])
    bf16 = [
        *lines[0],
        "--param_dtype",
        "bf16",
        "--gradient_checkpointing",
        "--verify_resume",
        "2",
        "--eval_dataset",
        data,
    ]
    lines.append([*bf16, "--output_dir", str(folder / "resumed")])
    (folder / "output.txt").write_text(train_many(2, lines, folder, timeout=600))
    return folder


@pytest.fixture(scope="module")
def plain(here):
    """The plain loop of a model and what trains in it, run once."""
    rows, known = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()], {}

    def run(kind: str, trained: str) -> dict:
        if (kind, trained) not in known:
            options = {"frozen": TOWERS[kind]} if trained == "frozen" else {}
            options |= {"tower": TOWERS[kind], "tower_lr": TOWER_LR} if trained == "rate" else {}
            options |= {"lora_rank": 4} if trained == "lora" else {}
            known[kind, trained] = vision_reference.plain_run(str(here / kind), rows, here, lr=1e-3, steps=2, **options)
        return known[kind, trained]

    return run


@pytest.mark.parametrize(("name", "kind", "flags", "trained"), RUNS, ids=IDS)
def test_parity_with_a_plain_loop(here, plain, name, kind, flags, trained):
    found, expected = here / f"{name}-{kind}", plain(kind, trained)
    rows = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    for step, row in enumerate(rows):
        assert row["loss"] == pytest.approx(expected["losses"][step], abs=1e-5), step
        assert row["grad_norm"] == pytest.approx(expected["norms"][step], rel=1e-4), step
    gradients = load_file(found / "dump" / "grads_step1.safetensors")
    assert set(gradients) == set(expected["grads"])
    for tensor, gradient in expected["grads"].items():
        largest = gradient.abs().max().clamp_min(1e-3)
        assert (gradients[tensor] - gradient).abs().max() / largest < 1e-4, tensor
    weights = load_file(found / "dump" / "weights_final.safetensors")
    for tensor, weight in weights.items():
        if not tensor.endswith("k_proj.bias"):  # its gradient is 0 but for rounding, and Adam divides noise by noise
            assert (weight - expected["weights"][tensor]).abs().max() < 2e-4, tensor


@pytest.mark.parametrize(
    "name", ["fsdp2-qwen3_vl", "fsdp2_frozen-gemma3", "zero3_frozen-qwen3_vl", "zero2_tp-qwen3_vl"]
)
def test_what_is_saved_is_a_model_of_images_and_text(here, name):
    """The tensors have the names of the source, the processor's files came along, and a frozen tower is unchanged."""
    kind, saved = name.split("-")[1], here / name / "model"
    own, source = load_file(saved / "model.safetensors"), load_file(here / kind / "model.safetensors")
    assert set(own) == set(source)
    tower = [tensor for tensor in source if any(part in tensor for part in TOWERS[kind])]
    assert tower and all(torch.equal(own[tensor], source[tensor]) == ("frozen" in name) for tensor in tower[:1])
    files = [path.name for path in (here / kind).iterdir() if path.name.endswith("processor_config.json")]
    assert files and all((saved / file).read_bytes() == (here / kind / file).read_bytes() for file in files)
    _, info = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info


def test_a_run_says_what_trains_and_resumes_bitwise(here):
    output = (here / "output.txt").read_text()
    assert "images: the vision tower is frozen (" in output and "images: the adapter trains;" in output
    assert "images: the vision tower, its projector and the language model train" in output
    assert "replayed, bitwise the same" in output

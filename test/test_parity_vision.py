"""Models of images and text train as in a plain loop of transformers: losses, every gradient, weights, and what is saved."""

import json
from pathlib import Path

import pytest
import torch
import vision_models
import vision_reference
from launch import FULL, train_many
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

TOWERS = {"qwen3_vl": ("visual.blocks.", "visual.patch_embed.", "visual.pos_embed."), "gemma3": ("vision_tower.",)}
FSDP2, ZERO2, ZERO3 = (
    ["--backend", *words.split()] for words in ("fsdp2", "deepspeed --zero_stage 2", "deepspeed --zero_stage 3")
)
WHOLE = ["--freeze_vision", "false"]
TP, PACKED = ["--tensor_parallel_size", "2"], ["--packing_samples"]
RING, ULYSSES = ["--ring_attn_size", "2"], ["--ring_attn_size", "2", "--sp_mode", "ulysses"]
CACHED = ["--cache_pixels"]
TOWER_LR = 1e-4
# (name of the run, model, flags, what trains). Rank 1 of a run with micro-batches of 1 has some without an image.
RUNS = [
    ("fsdp2", "qwen3_vl", [*FSDP2, *WHOLE, "--micro_train_batch_size", "1"], "all"),
    ("fsdp2", "gemma4", [*FSDP2, *WHOLE], "all"),
    ("fsdp2_packed", "qwen3_5", [*FSDP2, *WHOLE, *PACKED, "--micro_train_batch_size", "1"], "all"),
    ("fsdp2_tp", "mistral3", [*FSDP2, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("zero2_tp", "qwen3_vl", [*ZERO2, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("zero3_tp", "qwen3_vl_moe", [*ZERO3, *WHOLE, *TP, "--micro_train_batch_size", "4"], "all"),
    ("fsdp2_frozen", "gemma3", [*FSDP2], "frozen"),
    ("zero3_frozen", "qwen3_vl", [*ZERO3], "frozen"),
    ("fsdp2_rate", "gemma3", [*FSDP2, *WHOLE, "--vision_learning_rate", str(TOWER_LR)], "rate"),
    ("zero3_lora", "gemma3", [*ZERO3, "--lora_rank", "4"], "lora"),
    ("fsdp2_ring_packed", "qwen3_vl", [*FSDP2, *WHOLE, *RING, *PACKED, "--micro_train_batch_size", "4"], "all"),
    ("zero2_ulysses", "smolvlm", [*ZERO2, *WHOLE, *ULYSSES, "--micro_train_batch_size", "4"], "all"),
    ("dpo_zero3", "gemma3", [*ZERO3, *WHOLE, *CACHED, "--micro_train_batch_size", "1"], "all"),
    ("dpo_fsdp2_ring", "qwen3_5", [*FSDP2, *WHOLE, *RING, *CACHED, "--precompute_ref_logps"], "all"),
    ("dpo_zero2_lora", "qwen3_vl", [*ZERO2, "--lora_rank", "4"], "lora"),
    ("kto_fsdp2", "qwen3_vl", [*FSDP2, *WHOLE, "--loss", "kto", "--train_batch_size", "16"], "all"),
    ("rm_fsdp2", "gemma3", [*FSDP2, *WHOLE, "--micro_train_batch_size", "1"], "all"),
    ("grpo_fsdp2_packed", "qwen3_vl", [*FSDP2, *WHOLE, *PACKED, *CACHED, "--micro_train_batch_size", "2"], "all"),
    ("grpo_fsdp2_tp_lora", "qwen3_vl", [*FSDP2, *TP, "--lora_rank", "4"], "lora"),
]
if FULL:  # `PARITY=full`
    RUNS += [
        ("zero2", "mistral3", [*ZERO2, *WHOLE, "--micro_train_batch_size", "1"], "all"),
        ("zero3", "smolvlm", [*ZERO3, *WHOLE, "--micro_train_batch_size", "4"], "all"),
        ("fsdp2_lora", "qwen3_vl", [*FSDP2, "--lora_rank", "4"], "lora"),
        ("rm_zero3_packed", "qwen3_5", [*ZERO3, *WHOLE, *PACKED, "--micro_train_batch_size", "2"], "all"),
        ("grpo_zero3", "gemma3", [*ZERO3, *WHOLE, "--micro_train_batch_size", "1"], "all"),
        ("fsdp2", "gemma3", [*FSDP2, *WHOLE, "--micro_train_batch_size", "4"], "all"),
        ("zero2_packed", "qwen3_vl", [*ZERO2, *WHOLE, *PACKED, *CACHED, "--micro_train_batch_size", "1"], "all"),
        ("dpo_fsdp2_packed", "mistral3", [*FSDP2, *WHOLE, *PACKED, "--micro_train_batch_size", "1"], "all"),
        ("grpo_zero2_ring", "mistral3", [*ZERO2, *WHOLE, *RING, "--micro_train_batch_size", "4"], "all"),
    ]
COMMANDS = {
    "dpo": "train_dpo",
    "kto": "train_dpo",
    "rm": "train_rm",
    "grpo": "train_ppo",
}  # by the begin of a run's name
IDS = [f"{name}-{kind}" for name, kind, _, _ in RUNS]
COMMON = "--max_len 512 --train_batch_size 8 --max_steps 2 --learning_rate 1e-3 --lr_scheduler constant --no_shuffle"
COMMON += " --param_dtype fp32 --cpu_matmul mkl --micro_train_batch_size 2"
GRPO = (
    "--input_key prompt --advantage_estimator dr_grpo --loss_agg token --rollout_batch_size 8 --n_samples_per_prompt 2"
)
GRPO += " --train_batch_size 16 --micro_rollout_batch_size 8 --prompt_max_len 500 --generate_max_len 6 --max_steps 1"
REWARD = """import os

def reward_func(prompts, responses, labels, images):
    assert all(os.path.isabs(path) and os.path.exists(path) for row in images for path in row)
    return [len(row) + sum(map(ord, response)) % 7 for row, response in zip(images, responses)]
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """All runs have been made, in one launch of 2 ranks; and one of them in bf16 has replayed its steps."""
    folder = tmp_path_factory.mktemp("vision")
    pairs, data = vision_models.write_pairs(folder), vision_models.write_rows(folder)
    for kind in {kind for _, kind, _, _ in RUNS}:
        vision_models.make_folder(kind, folder / kind)
    (folder / "reward.py").write_text(REWARD)
    lines = []
    for (_, kind, flags, _), name in zip(RUNS, IDS, strict=True):
        command = COMMANDS.get(name.split("_")[0], "train_sft")
        own = ["--output_dir", str(folder / name), "--parity_dump", str(folder / name / "dump")]
        own += ["--dataset", data if command == "train_sft" else pairs]
        common = COMMON.split()
        if command == "train_ppo":
            common = [*common[2:], *GRPO.split(), "--reward_func", str(folder / "reward.py")]  # without --max_len
        lines.append([command, "--pretrain", str(folder / kind), *common, *flags, *own])
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
    """The plain loop of a model, a method and what trains in it, run once."""
    known = {}

    def run(name: str, kind: str, trained: str) -> dict:
        method = name.split("_")[0] if name.split("_")[0] in COMMANDS else "sft"
        if (kind, method, trained) not in known:
            file = here / ("rows.jsonl" if method == "sft" else "pairs.jsonl")
            file = here / f"{name}-{kind}" / "rollouts.jsonl" if method == "grpo" else file
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            options = {"frozen": TOWERS[kind]} if trained == "frozen" else {}
            options |= {"tower": TOWERS[kind], "tower_lr": TOWER_LR} if trained == "rate" else {}
            options |= {"lora_rank": 4} if trained == "lora" else {}
            options |= {"lr": 1e-3, "steps": 1 if method == "grpo" else 2, "method": method}
            known[kind, method, trained] = vision_reference.plain_run(str(here / kind), rows, here, **options)
        return known[kind, method, trained]

    return run


@pytest.mark.parametrize(("name", "kind", "flags", "trained"), RUNS, ids=IDS)
def test_parity_with_a_plain_loop(here, plain, name, kind, flags, trained):
    found = vision_reference.differences(here / f"{name}-{kind}", plain(name, kind, trained))
    assert found["loss"] < 1e-5 and found["norm"] < 1e-4 and found["gradients"] < 1e-4 and found["weights"] < 2e-4, (
        found
    )


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


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith("grpo")])
def test_the_engine_draws_from_the_policy_that_trains(here, name):
    """Its log-probs are those of training, and those that a plain forward pass of transformers gives."""
    [row] = [row for row in map(json.loads, (here / name / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert row["rollout_logprob_diff_max"] < 1e-4 and row["reward_std"] > 0
    rollouts = [json.loads(line) for line in (here / name / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    for sample, plain in vision_reference.plain_log_probs(str(here / name.split("-")[1]), rollouts, here):
        assert torch.allclose(torch.tensor(sample["log_probs"]), plain, atol=1e-4)


def test_a_run_says_what_trains_and_resumes_bitwise(here):
    output = (here / "output.txt").read_text()
    assert "images: the vision tower is frozen (" in output and "images: the adapter trains;" in output
    assert "images: the vision tower, its projector and the language model train" in output
    assert "replayed, bitwise the same" in output

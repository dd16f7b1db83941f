"""--reduce_dtype bf16 on both backends: the first loss is the same, and the gradient differs by one rounding."""

import pytest
from launch import read_steps, train_many

from trainer.datasets.demos.demo import make_demo

RUNS = {"fsdp2": ["--backend", "fsdp2"]}
RUNS |= {f"zero{stage}": ["--backend", "deepspeed", "--zero_stage", str(stage)] for stage in range(4)}
BF16_ROUNDING = 2**-9  # the largest relative error of one rounding to bf16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reduce")
    make_demo(str(folder / "demo"))
    common = ["--pretrain", str(folder / "demo/model"), "--dataset", str(folder / "demo/sft.jsonl"), "--no_save"]
    common += ["--param_dtype", "fp32", "--max_steps", "2", "--train_batch_size", "8", "--micro_train_batch_size", "2"]
    lines = [
        [*common, *flags, "--reduce_dtype", dtype, "--output_dir", str(folder / f"{name}-{dtype}")]
        for name, flags in RUNS.items()
        for dtype in ("fp32", "bf16")
    ]
    train_many(2, lines, folder, timeout=300)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_rounded_once_per_reduction(folder, name):
    plain, rounded = (read_steps(folder / f"{name}-{dtype}")[0] for dtype in ("fp32", "bf16"))
    assert rounded["loss"] == plain["loss"]
    assert 0 < abs(rounded["grad_norm"] / plain["grad_norm"] - 1) < BF16_ROUNDING

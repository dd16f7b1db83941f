"""Early stopping ends at the step that the printed evaluations say, on each layout and after a resume; model/ is the best one."""

import math
import os

import pytest
from launch import forked, read_rows, train_many
from safetensors.torch import load_file

from trainer.checkpoints.shards import ShardReader
from trainer.cli.export import run as export
from trainer.datasets.demos.demo import make_demo
from trainer.training.checkpointing import Checkpoints, Progress, SavePolicy

PATIENCE, STEPS = 2, 12
LAYOUTS = {
    "fsdp2": ["fsdp2"],
    "tp": ["fsdp2", "--tensor_parallel_size", "2", "--async_save", "--save_only_model"],
    "zero3": ["deepspeed", "--zero_stage", "3", "--lora_rank", "4"],
}


def flags(folder, name: str, *more: str) -> list[str]:
    """Few rows and a high rate: the evaluation is best after a few steps."""
    demo = folder / "demo"
    line = [
        "--pretrain",
        f"{demo}/model",
        "--dataset",
        f"{demo}/sft.jsonl#8",
        "--apply_chat_template",
        "--max_len",
        "64",
    ]
    line += ["--eval_dataset", f"{demo}/sft_eval.jsonl#8", "--eval_steps", "1", "--max_steps", str(STEPS)]
    line += ["--train_batch_size", "4", "--micro_train_batch_size", "2", "--param_dtype", "fp32"]
    line += ["--learning_rate", "3e-2", "--lr_scheduler", "constant", "--lr_warmup_ratio", "0"]
    return [*line, "--output_dir", str(folder / name), *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    make_demo(str(folder / "demo"))
    patience = ["--early_stopping_patience", str(PATIENCE), "--save_hf_ckpt", "--max_ckpt_num", "1"]
    lines = [flags(folder, name, "--backend", *mode, *patience) for name, mode in LAYOUTS.items()]
    lines += [flags(folder, "whole", "--load_best_model_at_end")]
    (folder / "output").write_text(train_many(2, lines, folder, timeout=280))
    return folder


def evaluations(run) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in read_rows(run) if "eval_loss" in row}


def expected(values: dict[int, float]) -> tuple[int, int]:
    """(the last step, the best one), from the values of a whole run: the first N in a row above the lowest so far."""
    for last in values:
        best = min((step for step in values if step <= last), key=values.__getitem__)
        if last - best == PATIENCE:
            return last, best
    raise AssertionError("these flags do not stop early")


def weights(folder):
    [file] = (name for name in os.listdir(folder) if name.endswith(".safetensors"))
    return load_file(f"{folder}/{file}")


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_a_run_without_patience_goes_to_its_end_and_saves_the_best(folder):
    values = evaluations(folder / "whole")
    assert list(values) == list(range(1, STEPS + 1))
    best = min(values, key=values.__getitem__)
    assert best < STEPS and f"best eval_loss: {values[best]:.9g} at step {best}\n" in (folder / "output").read_text()
    card = (folder / "whole/model/README.md").read_text()
    assert f"| final eval_loss | {values[best]:.4g} |" in card and f"| steps | {best} |" in card


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_stops_where_its_evaluations_say(folder, name):
    values = evaluations(folder / name)
    last, best = expected(values)
    assert list(values) == list(range(1, last + 1)) and last < STEPS
    assert f"early stopping after step {last}: 2 evaluations in a row" in (folder / "output").read_text()
    assert read_rows(folder / name)[-1] == {"event": "end", "steps": last}
    saved = weights(folder / name / "model")
    assert same(saved, weights(folder / name / f"checkpoints/step_{best}/hf"))
    assert os.path.realpath(folder / name / "checkpoints/best").endswith(f"/step_{best}")


def test_a_resume_stops_at_the_same_step_with_the_same_model(folder):
    """Stopped after each step between the best and the end; and once more when it has ended."""
    last, best = expected(evaluations(folder / "fsdp2"))
    more = ["--early_stopping_patience", str(PATIENCE), "--save_steps", "1", "--load_checkpoint"]
    runs = [
        [*flags(folder, "resumed", *more), "--max_steps", str(step)] for step in (*range(best, last + 1), STEPS, STEPS)
    ]
    output = train_many(2, runs, folder, timeout=200)
    assert evaluations(folder / "resumed") == evaluations(folder / "fsdp2")
    assert same(weights(folder / "resumed/model"), weights(folder / "fsdp2/model"))
    ended = f"nothing left to do: step {last} of {STEPS} (more: a larger --early_stopping_patience)"
    assert output.count(ended) == 2, output[-3000:]


def test_a_best_value_without_its_checkpoint_does_not_count_after_a_resume(folder):
    last, _ = expected(evaluations(folder / "fsdp2"))
    resumed = ["--load_checkpoint", f"{folder}/resumed/checkpoints/step_{last}", "--max_steps", str(last + 1)]
    line = flags(folder, "elsewhere", "--load_best_model_at_end", *resumed)
    code, output = forked(1, "-m", "trainer.cli.train_sft", *line)
    assert code == 0 and "does not count any more: its checkpoint is not in" in output, output[-2000:]
    assert f"best eval_loss: {evaluations(folder / 'elsewhere')[last + 1]:.9g} at step {last + 1}" in output


def test_a_checkpoint_without_optimizer_has_the_weights_and_no_run_goes_on_from_it(folder, tmp_path):
    checkpoint = os.path.realpath(folder / "tp/checkpoints/best")
    keys = ShardReader(checkpoint).shapes.keys()
    assert keys and all(key.startswith("weight/") for key in keys)
    code, output = forked(1, "-m", "trainer.cli.train_sft", *flags(folder, "tp", "--load_checkpoint", checkpoint))
    expected = f"error: --load_checkpoint: {checkpoint} has no optimizer to go on with: it was saved for its model only"
    assert code and expected in output, output[-2000:]
    export([checkpoint, str(tmp_path / "model")])
    assert same(weights(tmp_path / "model"), weights(folder / "tp/model"))


def test_patience_counts_evaluations_that_are_not_better():
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints.policy, progress = SavePolicy(best_metric_key="eval_reward", early_stopping_patience=2), Progress()
    assert not checkpoints._is_best(progress, {"eval_reward": math.nan}) and progress.best_step is None
    for value, patient in ((1.0, True), (1.0, True), (2.0, True), (math.nan, True), (1.5, False)):
        checkpoints._is_best(progress, {"eval_reward": value})
        assert checkpoints.policy.has_lost_patience(progress) is not patient
    assert progress.best_metric == 2.0

"""train_ppo --teacher: the policy comes closer to the teacher on its own responses, without any reward."""

import re
import sys

import pytest
import torch
from launch import read_steps, run_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli.train_ppo import parse
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.runs.rl.rl_checks import validate

COMMAND = [sys.executable, "-m", "trainer.cli.train_ppo", "--pretrain"]


def make_teacher(model_folder: str, folder: str, noise: float = 2) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        model.get_output_embeddings().weight *= 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)


def test_a_policy_comes_closer_to_its_teacher(tmp_path):
    demo = tmp_path / "demo"
    make_demo(str(demo))
    make_teacher(f"{demo}/model", str(tmp_path / "teacher"))
    line = [*COMMAND, f"{demo}/model", "--teacher", str(tmp_path / "teacher"), "--dataset", f"{demo}/prompts.jsonl"]
    line += ["--apply_chat_template", "--max_samples", "32", "--num_episodes", "12", "--rollout_batch_size", "32"]
    line += ["--n_samples_per_prompt", "8", "--generate_max_len", "12", "--prompt_max_len", "200", "--max_steps", "12"]
    line += ["--micro_rollout_batch_size", "256", "--train_batch_size", "256", "--micro_train_batch_size", "256"]
    line += ["--learning_rate", "4e-3", "--lr_scheduler", "constant", "--param_dtype", "fp32"]
    code, output = run_process([*line, "--backend", "fsdp2", "--no_save", "--output_dir", str(tmp_path / "run")])
    assert code == 0, output[-3000:]
    rows = read_steps(tmp_path / "run")
    kl = [row["kl"] for row in rows]
    assert len(kl) == 12 and sum(kl[-4:]) / 4 < 0.8 * sum(kl[:2]) / 2, kl
    assert {row["reward"] for row in rows} == {0.0} and rows[0]["kl_coef"] == 1.0


@pytest.mark.parametrize(
    "flags",
    [
        ["--teacher", "t", "--kl_estimator", "k3"],
        ["--advantage_estimator", "rloo", "--teacher", "math=t,code=u"],
        ["--teacher", "http://t"],
        ["--teacher_key", "domain", "--teacher", "t,u"],
        ["--teacher_key", "domain", "--teacher", "math=t,math=u"],
        ["--teacher_key", "domain", "--teacher", "math=t,code="],
        ["--teacher", "t", "--ref_model", "r"],
        ["--teacher", "t", "--init_kl_coef", "0"],
        ["--teacher", "t", "--preset", "grpo"],
        ["--teacher", "t", "--dynamic_filtering"],
        ["--advantage_estimator", "distill"],
    ],
)
def test_flags_that_contradict_a_teacher(flags):
    flag = next(flag for flag in reversed(flags) if flag.startswith("--"))
    with pytest.raises(UserError, match=re.escape(flag)):
        validate(parse(["--pretrain", "m", "--dataset", "d", *flags])[0])

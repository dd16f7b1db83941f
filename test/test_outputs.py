"""Where runs write: nothing but a model is replaced, what cannot be written is told at once, a model keeps what it came with."""

import importlib.metadata
import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
from launch import run_until_gone, train_many
from safetensors.torch import load_file
from test_errors import assert_one_line
from test_parity_preference import make_mixture_of_experts

from trainer.cli import train_ppo, train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.runs import outputs
from trainer.runs.flag_checks import check_outputs
from trainer.runs.output_folders import make_writable
from trainer.training.checkpointing import Checkpoints, Progress, SavePolicy

GENERATION = {
    "eos_token_id": [2, 5],
    "temperature": 0.9,
    "top_p": 0.6,
}  # without do_sample, as Llama 2 and Vicuna have it
MODES = {"fsdp2": ["fsdp2"], "z2": ["deepspeed", "--zero_stage", "2"], "z3": ["deepspeed", "--zero_stage", "3"]}
EXPERTS = {"fsdp2": MODES["fsdp2"], "z3": MODES["z3"]}


def line(folder, name: str, model: str, mode: list[str], *more: str) -> list[str]:
    data = ["--pretrain", str(folder / model), "--dataset", str(folder / "demo/sft.jsonl"), "--apply_chat_template"]
    sizes = ["--max_samples", "4", "--max_len", "64", "--train_batch_size", "2", "--micro_train_batch_size", "2"]
    more = ["--max_steps", "1", "--param_dtype", "fp32", "--learning_rate", "1e-300", *more]
    return [*data, *sizes, "--output_dir", str(folder / name), "--backend", *mode, *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    make_demo(str(folder / "demo"))
    shutil.copytree(folder / "demo/model", folder / "samples")
    (folder / "samples/generation_config.json").write_text(json.dumps(GENERATION))
    make_mixture_of_experts(folder / "experts", folder / "demo/model")
    (folder / "target").mkdir()
    (folder / "link").symlink_to(folder / "target")
    lines = [line(folder, f"samples-{name}", "samples", mode) for name, mode in MODES.items()]
    lines += [line(folder, f"experts-{name}", "experts", mode, "--save_steps", "1") for name, mode in EXPERTS.items()]
    lines += [line(folder, "linked", "samples", ["fsdp2"], "--save_path", str(folder / "link"))]
    lines += [line(folder, "proof", "samples", ["fsdp2"], "--verify_resume", "1")]
    train_many(1, lines, folder, timeout=300)
    return folder


@pytest.mark.parametrize("name", MODES)
def test_a_saved_model_generates_as_it_did(folder, name):
    saved = json.loads((folder / f"samples-{name}/model/generation_config.json").read_text())
    assert {key: saved.get(key) for key in GENERATION} == GENERATION
    assert "do_sample" not in saved


@pytest.mark.parametrize("name", EXPERTS)
def test_a_mixture_of_experts_has_the_names_of_its_hub_format(folder, name):
    original = load_file(folder / "experts/model.safetensors")
    saved = load_file(folder / f"experts-{name}/model/model.safetensors")
    assert any(".experts.3.gate_proj.weight" in key for key in original)
    assert saved.keys() == original.keys()
    assert all(saved[key].equal(original[key]) for key in original)  # trained at a rate of 0


def test_an_exported_mixture_of_experts_has_them_too(folder):
    from trainer.cli.export import run

    run([str(folder / "experts-fsdp2/checkpoints/step_1"), str(folder / "exported")])
    original, saved = (load_file(folder / f"{name}/model.safetensors") for name in ("experts", "exported"))
    assert saved.keys() == original.keys()
    assert all(saved[key].equal(original[key]) for key in original)


def test_a_link_is_written_through(folder):
    assert os.path.islink(folder / "link") and (folder / "target/model.safetensors").exists()


def test_checkpoints_of_a_proof_are_no_later_runs(folder):
    refused = line(folder, "proof", "samples", ["fsdp2"])
    code, output, _ = run_until_gone(["python", "-m", "trainer.cli.train_sft", *refused], timeout=120)
    assert code == 2
    assert_one_line(output, ["--output_dir", "holds another run", "--overwrite"])


def args_of(command, *flags: str):
    return command.parse(["--dataset", "d", *flags])[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    {
        "--pretrain proj/model --output_dir proj": "--output_dir: proj/model would replace --pretrain",
        "--pretrain linked --output_dir proj": "--output_dir: proj/model would replace --pretrain",
        "--pretrain base --output_dir proj": "--output_dir: proj/model holds a model that no run in --output_dir wrote",
        "--pretrain base --output_dir notes": "--output_dir: notes/model holds no model",
        "--pretrain base --save_path thesis": "--save_path: thesis holds no model",
        "--pretrain base --save_path /": "--save_path: / would replace --pretrain",
        "--pretrain base --save_path /proc": "--save_path: /proc is a mount point",
    }.items(),
)
def test_only_models_of_runs_are_replaced(flags, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, held in (
        ("proj/model", "config.json"),
        ("notes/model", "notes.txt"),
        ("thesis", "1.tex"),
        ("base", "config.json"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / held).write_text("{}")
    (tmp_path / "linked").symlink_to("proj/model")
    with pytest.raises(UserError, match="^" + re.escape(expected)):
        check_outputs(args_of(train_sft, *flags.split()))
    check_outputs(args_of(train_sft, "--pretrain", "base", "--output_dir", "proj", "--overwrite"))
    (tmp_path / "proj/metrics.jsonl").write_text("{}\n")
    check_outputs(args_of(train_sft, "--pretrain", "base", "--output_dir", "proj"))


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/", "is /"),
        ("/tmp/..", "is /"),
        ("~home", "a folder within it"),
        ("base", "is the folder of --pretrain"),
        ("./linked/", "is the folder of --pretrain"),
        ("data", "is the folder of --dataset"),
        ("other", "holds a model"),
    ],
)
def test_a_run_folder_is_no_other_folder(tmp_path, monkeypatch, folder, found):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "~home"))
    for name in ("base", "data", "~home", "other", "good"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    (tmp_path / "linked").symlink_to("base")
    sources = ["--pretrain", "base", "--dataset", "x.jsonl,data"]
    with pytest.raises(UserError, match=f"^--output_dir: .*{found}"):
        check_outputs(args_of(train_sft, *sources, "--output_dir", folder))
    check_outputs(args_of(train_sft, *sources, "--output_dir", "good"))


def test_a_run_folder_that_was_moved_does_not_come_back(tmp_path):
    """Also one that was replaced by another folder."""
    run, policy = tmp_path / "run", SavePolicy()
    run.mkdir()
    strategy = SimpleNamespace(is_rank_0=lambda: True)
    checkpoints = Checkpoints(str(run), SimpleNamespace(strategy=strategy), policy, None)
    checkpoints.check_place()
    run.rename(tmp_path / "elsewhere")
    for action in (checkpoints.save, checkpoints.end):
        with pytest.raises(UserError, match="moved or replaced"):
            action(Progress())
    assert not run.exists()
    run.mkdir()
    with pytest.raises(UserError, match="moved or replaced"):
        checkpoints.check_place()


def test_the_average_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out_ema").mkdir()
    (tmp_path / "out_ema/thesis.txt").write_text("precious")
    flags = ["--pretrain", "m", "--reward_func", "math", "--save_path", "out"]
    check_outputs(args_of(train_ppo, *flags))
    with pytest.raises(UserError, match="--save_path: out_ema holds no model"):
        check_outputs(args_of(train_ppo, *flags, "--ema_beta", "0.9"))


def test_what_cannot_be_written_is_told_before_the_first_step(folder):
    (folder / "afile").write_text("")
    for flag, path in (("--save_path", "afile/model"), ("--parity_dump", "afile")):
        wrong = line(folder, f"wrong-{flag[2:]}", "samples", ["fsdp2"], flag, str(folder / path))
        code, output, _ = run_until_gone(["python", "-m", "trainer.cli.train_sft", *wrong], timeout=120)
        assert code == 2 and "step 1/" not in output
        assert_one_line(output, [flag, "afile", "a folder that can be written"])
    with pytest.raises(UserError, match="--save_path: /proc/none"):
        make_writable("--save_path", "/proc/none")


def test_versions_name_the_kernels_that_a_machine_has(monkeypatch):
    """transformers takes fla, causal-conv1d and mamba-ssm wherever it can import them. The certificate has these versions."""
    own, real = {"flash-linear-attention": "0.6.0", "causal-conv1d": "1.6.0"}, importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: own.get(name) or real(name))
    found = outputs.versions()
    assert found.items() >= own.items() and {"python", "torch", "deepspeed"} <= found.keys()
    assert "mamba-ssm" not in found

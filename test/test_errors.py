"""Bad input: one line that names the cause, exit code 2, no traceback, every rank gone within 30 s."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from launch import LAUNCHER, ROOT, forked, installed, run_process, run_until_gone, torchrun
from transformers import GPT2Config

from trainer.runs.outputs import ConfigDumper

MODULE = "trainer.cli.train_sft"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with the embedded demo in it, and broken copies of its data beside."""
    from trainer.datasets.demos.demo import make_demo

    folder = tmp_path_factory.mktemp("errors")
    make_demo(str(folder / "demo"))
    good = (folder / "demo" / "sft.jsonl").read_text().splitlines()[:20]
    (folder / "broken.jsonl").write_text("\n".join([*good[:6], '{"messages": [', *good[6:]]))
    (folder / "empty.jsonl").write_text("")
    (folder / "other_keys.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    shutil.copytree(folder / "demo" / "model", folder / "no_weights")
    (folder / "no_weights" / "model.safetensors").unlink()
    shutil.copytree(folder / "demo" / "model", folder / "learned")
    GPT2Config(vocab_size=512, n_positions=64, n_embd=16, n_layer=1, n_head=2).save_pretrained(folder / "learned")
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text("{}\n")
    return folder


MODEL = ["--pretrain", "demo/model"]
DATA = ["--dataset", "demo/sft.jsonl", "--apply_chat_template"]
CASES = {
    "unknown flag": (["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate?"]),
    "unknown backend": (["--backend", "horovod"], ["--backend", "horovod", "deepspeed, fsdp2"]),
    "wrong dtype": (["--param_dtype", "fp8"], ["--param_dtype", "fp8", "bf16, fp16, fp32"]),
    "wrong number": (["--train_batch_size", "0"], ["--train_batch_size", "0", "above 0"]),
    "betas": ([*MODEL, *DATA, "--adam_betas", "0.9", "1.5"], ["--adam_betas", "0.9 1.5", "below 1"]),
    "seed": ([*MODEL, *DATA, "--seed", str(2**63)], ["--seed", "below 2**63"]),
    "infinite": ([*MODEL, *DATA, "--learning_rate", "inf"], ["--learning_rate", "inf", "a finite number"]),
    "missing config file": (["--config", "none.yaml"], ["--config", "none.yaml"]),
    "only one of pretrain and dataset": (MODEL, ["--dataset", "missing"]),
    "scheduler": ([*MODEL, *DATA, "--lr_scheduler", "cosin"], ["--lr_scheduler", "cosin", "cosine_with_min_lr"]),
    "zero stage": ([*MODEL, *DATA, "--backend", "deepspeed", "--zero_stage", "4"], ["--zero_stage", "4", "0, 1, 2"]),
    "zero stage of fsdp2": ([*MODEL, *DATA, "--zero_stage", "1"], ["--zero_stage", "1", "3"]),
    "flash-attn absent": ([*MODEL, *DATA, "--attn_implementation", "flash_attention_2"], ["flash-attn", "[flash]"]),
    "batch sizes": (
        [*MODEL, *DATA, "--train_batch_size", "10", "--micro_train_batch_size", "4"],
        ["--train_batch_size", "10", "--micro_train_batch_size 1, 2, 5, 10"],
    ),
    "missing file": ([*MODEL, "--dataset", "none.jsonl"], ["--dataset", "none.jsonl", "not found"]),
    "broken line": ([*MODEL, "--dataset", "broken.jsonl", "--apply_chat_template"], ["broken.jsonl", "line 7"]),
    "absent key": (
        [*MODEL, "--dataset", "other_keys.jsonl", "--input_key", "question", "--output_key", "answer"],
        ["--input_key", "question", "prompt, answer"],
    ),
    "empty set": ([*MODEL, "--dataset", "empty.jsonl", "--apply_chat_template"], ["--dataset", "empty.jsonl"]),
    "no weights": (["--pretrain", "no_weights", *DATA], ["--pretrain", "no_weights", "no weights"]),
    "learned positions": (
        ["--pretrain", "learned", *DATA, "--max_len", "65"],
        ["--max_len: 65 tokens, more than the model's 64 positions (allowed: up to 64)"],
    ),
    "no model folder": (["--pretrain", "./nowhere", *DATA], ["--pretrain", "./nowhere"]),
    "used output folder": ([*MODEL, *DATA, "--output_dir", "used"], ["--output_dir", "used", "--overwrite"]),
}


def assert_one_line(output: str, parts: list[str]) -> None:
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, output[-3000:]
    for part in parts:
        assert part in lines[0], (part, lines[0])


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(demo, case):
    arguments, parts = CASES[case]
    code, output = forked(1, "-m", MODULE, *arguments, cwd=demo, timeout=120)
    assert code == 1 and output.endswith("RuntimeError: exit code 2"), output[-3000:]
    assert_one_line(output, parts)


@pytest.mark.parametrize("case", ["unknown flag", "wrong number", "no weights"])
def test_a_process_ends_with_exit_code_2(demo, case):
    """One case before torch is imported, one after the flags, one after the strategy is set up."""
    arguments, parts = CASES[case]
    code, output, seconds = run_until_gone([sys.executable, "-m", MODULE, *arguments], cwd=demo, timeout=120)
    assert code == 2, output[-3000:]
    assert "Traceback" not in output
    assert_one_line(output, parts)
    assert seconds < 30


@pytest.mark.parametrize("case", ["broken line", "no weights", "used output folder"])
def test_all_ranks_leave_and_one_of_them_speaks(demo, case):
    arguments, parts = CASES[case]
    command = [*LAUNCHER, "2", "-m", MODULE, *arguments, "--micro_train_batch_size", "4"]
    code, output, seconds = run_until_gone(command, cwd=demo, timeout=120, **installed())
    assert code == 2 and "exitcode" not in output, output[-3000:]
    assert_one_line(output, parts)
    assert output.splitlines()[-1].startswith("error: ")
    assert seconds < 30


def test_world_size_that_does_not_fit(demo):
    sizes = ["--train_batch_size", "16", "--micro_train_batch_size", "4"]
    code, output = torchrun(3, "-m", MODULE, *MODEL, *DATA, *sizes, cwd=demo, timeout=120)
    assert code != 0
    assert_one_line(output, ["--train_batch_size", "16", "3 data-parallel ranks", "multiple of 3"])


def test_help_is_grouped_quick_and_imports_no_torch():
    code, output = run_process([sys.executable, "-X", "importtime", "-m", MODULE, "--help"])
    assert code == 0
    for title in ("Model:", "Data:", "Batches:", "Optimization:", "Backend and layout:", "Output:"):
        assert title in output
    assert "torch" not in {line.rpartition("|")[2].strip() for line in output.splitlines() if "import time:" in line}
    seconds = []  # of CPU, whatever else the machine does
    for _ in range(5):
        before = os.times()
        run_process([sys.executable, "-m", MODULE, "--help"])
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert 0 < min(seconds) < 0.6, seconds


def test_config_file_with_overrides_and_a_misspelt_key(tmp_path):
    from trainer.errors import UserError
    from trainer.flags.common_flags import SFTArguments
    from trainer.flags.parse_flags import parse_arguments

    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 0.5\ntrain_batch_size: 8\npacking_samples: true\n")
    args = parse_arguments(SFTArguments, "train_sft", ["--config", str(config), "--train_batch_size", "4"])
    assert (args.optimizer.learning_rate, args.batch.train_batch_size, args.batch.packing_samples) == (0.5, 4, True)
    config.write_text("learning_rat: 0.5\n")
    with pytest.raises(UserError, match="did you mean --learning_rate"):
        parse_arguments(SFTArguments, "train_sft", ["--config", str(config)])


@pytest.mark.parametrize("text", ["### {}\n### Answer: ", "# {}", "1e-5", "null", "~", "[1]", "{a: b}", "007", "true"])
def test_a_text_is_taken_as_it_stands_and_config_yaml_repeats_it(text, tmp_path):
    from trainer.flags.common_flags import SFTArguments
    from trainer.flags.parse_flags import flat, parse_arguments

    args = parse_arguments(SFTArguments, "train_sft", ["--input_template", text, "--output_dir", text])
    assert args.data.input_template == args.output.output_dir == text
    config = tmp_path / "config.yaml"
    config.write_text(yaml.dump(flat(args), Dumper=ConfigDumper, sort_keys=False))
    assert parse_arguments(SFTArguments, "train_sft", ["--config", str(config)]) == args


def test_every_flag_of_openrlhf_style_scripts_is_known():
    _code, output = run_process([sys.executable, "-m", MODULE, "--help"], cwd=ROOT)
    promised = """backend pretrain dataset dataset_split dataset_probs eval_dataset eval_split input_key output_key
        input_template apply_chat_template tokenizer_chat_template max_len max_samples train_batch_size
        micro_train_batch_size max_epochs max_steps learning_rate lr_scheduler lr_warmup_ratio adam_betas weight_decay
        max_norm seed no_shuffle param_dtype gradient_checkpointing attn_implementation packing_samples pretrain_mode
        multiturn zero_stage adam_offload tensor_parallel_size fsdp_tensor_parallel_size ds_tensor_parallel_size
        use_hf_tp_plan sequence_parallel ring_attn_size dp_replicate_size eval_steps logging_steps save_steps
        max_ckpt_num load_checkpoint save_path output_dir use_wandb wandb_project use_tensorboard config"""
    missing = [flag for flag in promised.split() if f"--{flag} " not in output and f"--{flag}\n" not in output]
    assert not missing


def test_a_reader_that_leaves_is_one_line_and_no_traceback():
    code = "from trainer.entry import run_command; run_command(lambda _: [print('x' * 9999, flush=True) for _ in range(99)])"
    command = f'{sys.executable} -c "{code}" | head -c 5; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 2 and run.stdout == "xxxxx"
    assert run.stderr.splitlines() == [
        "error: standard output: nothing reads it any more, as after `| head`. Write it to a file, or read all of it."
    ]

"""A run that is stopped, killed or damaged goes on as if nothing had happened; whatever cannot go on says so in a line."""

import json
import os
import re
import signal
import subprocess
import sys

import kill_test
import pytest
import resume_matrix
import torch
from launch import ROOT, in_fork, installed, read_rows, read_steps, run_process, train_many
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from trainer.checkpoints import checkpoint_store as store
from trainer.cli import export
from trainer.datasets.demos.demo import make_demo
from trainer.flags.common_flags import SCHEDULES
from trainer.optimizers.build import build_scheduler

SAMPLE, SEED, MATRIX_STEPS = 3, 0, 4  # `python test/resume_matrix.py` takes every pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    make_demo(str(folder / "demo"))
    return folder


def flags(folder, name: str, *more: str) -> list[str]:
    demo = folder / "demo"
    line = ["--pretrain", f"{demo}/model", "--dataset", f"{demo}/sft.jsonl", "--apply_chat_template"]
    line += ["--max_samples", "60", "--max_len", "128", "--train_batch_size", "8", "--micro_train_batch_size", "4"]
    line += ["--learning_rate", "2e-3", "--param_dtype", "fp32", "--output_dir", str(folder / name)]
    return [*line, *more]


def train_alone(line: list[str], timeout: float = 120) -> tuple[int, str]:
    """train_sft in one process."""
    return in_fork("-m", "trainer.cli.train_sft", *line, timeout=timeout)


def curve(run, start: int = 0) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in read_steps(run)[start:]]


def error_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in output, output[-3000:]
    return lines[0]


# --- layouts


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    pairs = resume_matrix.sample_pairs(SAMPLE, SEED)
    return resume_matrix.run_pairs(pairs, tmp_path_factory.mktemp("matrix"), MATRIX_STEPS)


@pytest.mark.parametrize("pair", resume_matrix.sample_pairs(SAMPLE, SEED), ids="->".join)
def test_any_layout_goes_on_from_any_other(matrix, pair):
    """fp32 losses within 1e-5 of the plain loop; on the same layout bitwise those of the undisturbed run."""
    worst, same = matrix[pair]
    assert worst <= resume_matrix.TOLERANCE
    assert same or pair[0] != pair[1]


# --- kills


@pytest.mark.parametrize("backend", [["fsdp2", "--async_save"], ["deepspeed"]], ids=" ".join)
def test_killed_runs_join_to_the_undisturbed_curve(tmp_path, backend):
    kill_test.kill_test(tmp_path, ["--backend", *backend], count=2, seed=0)


# --- one process: saving, keeping, falling back


@pytest.fixture(scope="module")
def saved(folder):
    """A run of 12 steps with everything on: evaluation, best, rotation, export."""
    more = ["--max_steps", "12", "--save_steps", "3", "--max_ckpt_num", "2", "--save_hf_ckpt", "--eval_steps", "2"]
    more += ["--eval_dataset", f"{folder}/demo/sft_eval.jsonl", "--best_metric_key", "eval_loss"]
    code, output = train_alone(flags(folder, "saved", *more, "--load_checkpoint"))
    assert code == 0, output[-3000:]
    assert "no checkpoint in" in output and "starting fresh" in output
    return folder / "saved"


def test_rotation_and_the_best(saved):
    rows = [row for row in read_rows(saved) if "eval_loss" in row]
    best = min(rows, key=lambda row: row["eval_loss"])["step"]
    assert os.path.basename(os.path.realpath(saved / "checkpoints/best")) == f"step_{best}"
    kept = {os.path.basename(path) for path in store.list_checkpoints(str(saved / "checkpoints"))}
    assert "step_12" in kept and f"step_{best}" in kept and len(kept) == 2
    assert not list(saved.rglob("*.tmp"))


def test_the_exported_model_is_bit_for_bit_the_saved_one(saved, tmp_path):
    """model/ after the last step, hf/ in the checkpoint of that step, and `export` of it; and again once converted."""
    source, target, exported = saved / "checkpoints/step_12", tmp_path / "portable", tmp_path / "model"
    for arguments in ([source, target, "--portable"], [target, exported]):
        code, output = in_fork("-m", "trainer.cli.export", *map(str, arguments))
        assert code == 0, output
    expected = load_file(saved / "model/model.safetensors")
    for other in (source / "hf", exported):
        weights = load_file(other / "model.safetensors")
        assert weights.keys() == expected.keys() and "lm_head.weight" not in weights
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert {*os.listdir(other), "README.md"} == set(os.listdir(saved / "model"))
    assert "| command | train_sft |" in (exported / "README.md").read_text()  # a checkpoint outside of its run
    assert store.find_damage(str(target)) is None


def test_an_exported_model_in_another_dtype_and_in_small_files(saved, tmp_path):
    arguments = [str(saved / "checkpoints/step_12"), str(tmp_path / "model"), "--dtype", "bf16"]
    export.run([*arguments, "--max_shard_gb", "1e-5"])
    expected = load_file(saved / "model/model.safetensors")
    files = [load_file(path) for path in (tmp_path / "model").glob("*.safetensors")]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert len(files) > 2 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    cards = [(folder / "README.md").read_text().splitlines() for folder in (tmp_path / "model", saved / "model")]
    assert [line for line in cards[0] if line.startswith("|")] == [line for line in cards[1] if line.startswith("|")]


def test_the_model_card_tells_the_facts_of_the_run(saved):
    card = (saved / "model/README.md").read_text()
    for fact in ("train_sft", "sft.jsonl", "| steps | 12 |", "| learning_rate | 0.002 |", "fsdp2"):
        assert fact in card, card


def test_a_checkpoint_holds_no_secret_and_no_pickle(saved):
    for path in (saved / "checkpoints").rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".safetensors", ".jinja", ".index"), path
            head = path.read_bytes()[:2]
            assert head not in (b"\x80\x02", b"\x80\x04", b"PK"), path


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(folder):
    code, output = train_alone(flags(folder, "damaged", "--max_steps", "6", "--save_steps", "2", "--no_save"))
    assert code == 0, output[-3000:]
    expected, checkpoints = curve(folder / "damaged"), folder / "damaged/checkpoints"
    pieces = next((checkpoints / "step_6").glob("pieces-*"))
    pieces.write_bytes(pieces.read_bytes()[:-1])
    line = flags(folder, "damaged", "--max_steps", "6", "--no_save", "--load_checkpoint")
    code, output = train_alone(line)
    assert code == 0, output[-3000:]
    told = [line for line in output.splitlines() if "is damaged" in line]
    assert len(told) == 1 and "step_6" in told[0] and pieces.name in told[0] and "step_4" in told[0], output[-2000:]
    assert curve(folder / "damaged") == expected
    assert [row["step"] for row in read_rows(folder / "damaged") if row.get("event") == "resume"] == [4]

    for step in (2, 4):
        (checkpoints / f"step_{step}/state.json").unlink()
    code, output = train_alone(line)
    assert code == 2 and "is damaged" in error_line(output), "neither garbage nor a silent start from scratch"
    code, output = train_alone([*line, str(checkpoints / "step_4")])
    assert code == 2 and "state.json" in error_line(output)


def test_other_data_or_batches_are_refused(saved, folder):
    best = str(saved / "checkpoints/step_12")
    cases = {"--train_batch_size": ["--train_batch_size", "4"], "--seed": ["--seed", "1"]}
    cases |= {"--no_shuffle": ["--no_shuffle"], "--dataset": ["--max_samples", "50"]}
    for flag, change in cases.items():
        code, output = train_alone([*flags(folder, f"other{flag}"), *change, "--load_checkpoint", best])
        assert code == 2 and error_line(output).startswith(f"error: {flag}: "), output[-2000:]


def test_verify_resume_proves_it_in_one_line(folder):
    code, output = train_alone(flags(folder, "verify", "--verify_resume", "2", "--param_dtype", "bf16"))
    assert code == 0, output[-3000:]
    assert re.search(r"^verify_resume: 2 steps from .*step_2 replayed, bitwise the same$", output, re.MULTILINE)


# --- a full disk


def test_a_full_disk_ends_the_run_and_keeps_the_older_checkpoint(folder, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        line = flags(folder, "unused", "--max_steps", "8", "--save_steps", "2", "--no_save")
        line += ["--output_dir", str(disk / "run")]
        code, output = train_alone(line)
        assert code == 2 and "No space left on device" in error_line(output), output[-3000:]
        checkpoints = disk / "run/checkpoints"
        intact = store.list_checkpoints(str(checkpoints))
        assert intact and all(store.find_damage(path) is None for path in intact)
        assert not list(checkpoints.glob("*.tmp"))
        code, output = train_alone([*line, "--load_checkpoint", "--max_ckpt_num", "1", "--save_steps", "100"])
        assert code == 0 and "resumed from" in output, output[-3000:]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- signals and deaths


def start_and_signal(line: list[str], run, number: int, to_all: bool) -> str:
    """Start two ranks, send a signal to one of them or to torchrun after a few steps; returns the output."""
    log = run.parent / f"{run.name}.txt"
    process = kill_test.start(["-m", "trainer.cli.train_sft", *line], log, **installed())
    metrics = run / "metrics.jsonl"
    assert kill_test.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 4, process, 120)
    os.kill(process.pid if to_all else kill_test.children(process.pid)[1], number)
    assert process.wait(timeout=60) == 75
    return log.read_text()


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_signal_finishes_the_step_saves_and_leaves(folder, number, to_all):
    name = f"signal-{number}"
    line = flags(folder, name, "--max_steps", "40", "--no_save", "--load_checkpoint")
    output = start_and_signal(line, folder / name, number, to_all)
    assert f"stopped by {signal.Signals(number).name} after step" in output, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    steps = read_steps(folder / name)
    saved = store.list_checkpoints(str(folder / name / "checkpoints"))
    assert [os.path.basename(path) for path in saved] == [f"step_{steps[-1]['step']}"]
    train_many(2, [line], folder, timeout=300)
    rows = read_rows(folder / name)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41)), "no step twice and none left out"


def test_out_of_memory_is_one_line_that_names_the_flags(folder):
    # a limit a little above what the imports take
    script = "import resource, deepspeed, torch, transformers, datasets; from trainer.cli.train_sft import main; "
    script += "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (1 << 30); "
    script += "resource.setrlimit(resource.RLIMIT_AS, (size, size)); main()"
    line = flags(folder, "memory", "--train_batch_size", "4096", "--micro_train_batch_size", "4096")
    line += ["--max_samples", "4000", "--max_steps", "1"]
    code, output = run_process([sys.executable, "-c", script, *line], timeout=200, cwd=ROOT)
    assert code == 2, output[-3000:]
    assert "out of memory" in error_line(output) and "--micro_train_batch_size" in error_line(output)


# --- schedulers


def test_every_scheduler_is_rebuilt_from_its_arguments_and_the_step():

    from trainer.checkpoints.run_state import set_scheduler_step

    def make(name):
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=3e-4)
        return optimizer, build_scheduler(name, optimizer, total_steps=50, warmup_ratio=0.1, min_lr_ratio=0.1)

    for name in SCHEDULES:
        (optimizer, scheduler), (other_optimizer, other) = make(name), make(name)
        for _ in range(17):
            optimizer.step()
            scheduler.step()
        set_scheduler_step(other, 17)
        for _ in range(30):
            assert other.get_last_lr() == scheduler.get_last_lr() == [other_optimizer.param_groups[0]["lr"]], name
            scheduler.step()
            other.step()


def test_random_states_come_back_through_json():
    import random

    import numpy as np

    from trainer.checkpoints.run_state import random_states, restore_random_states

    def draw():
        return random.gauss(0, 1), np.random.randn(), torch.randn(()).item()

    draw()
    states = json.loads(json.dumps(random_states(torch.device("cpu"))))
    first = [draw() for _ in range(5)]
    restore_random_states(states, torch.device("cpu"))
    assert [draw() for _ in range(5)] == first


def test_copies_of_hybrid_sharding_are_those_of_the_checkpoint(folder):
    """ZeRO 3 gathers weights of more than 100,000 elements from copies within a group of replicas; none is older than the
    checkpoint."""
    config = Qwen3Config(
        vocab_size=304, hidden_size=320, intermediate_size=640, num_hidden_layers=1, num_attention_heads=5,
        num_key_value_heads=5, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "wide")
    AutoTokenizer.from_pretrained(folder / "demo/model").save_pretrained(folder / "wide")
    layout = ["--backend", "deepspeed", "--zero_stage", "3", "--dp_replicate_size", "2", "--no_save"]
    line = [
        *flags(folder, "wide-run", *layout, "--max_steps", "4", "--save_steps", "2"),
        "--pretrain",
        f"{folder}/wide",
    ]
    again = ["--load_checkpoint", f"{folder}/wide-run/checkpoints/step_2", "--output_dir", f"{folder}/wide-again"]
    train_many(2, [line, [*line, *again]], folder, timeout=300)
    assert curve(folder / "wide-again") == curve(folder / "wide-run", start=2)

"""The command `trainer`: it checks flags before ranks start, and its ranks end with it. The first line of a run."""
# ruff: noqa: F811 (a fixture of another file)

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import LAUNCHER, _environment, installed, run_process, run_until_gone
from safetensors.torch import load_file, save_file
from test_errors import CASES, DATA, MODEL, assert_one_line, demo  # noqa: F401 (demo is a fixture)

from trainer.cli import serve_train
from trainer.errors import UserError
from trainer.flags.groups import from_flat
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.rules import COMMANDS
from trainer.models.model_loading import load_tokenizer
from trainer.runs import start_line as start_line_of_run
from trainer.runs.flag_checks import check_files_of, check_flags
from trainer.runs.output_folders import check_rights, holds_run, open_folder
from trainer.runs.run_data import shortened
from trainer.runs.start_line import (
    NO_BF16,
    check_launcher,
    check_ranks_given,
    count_parameters,
    folder_here,
    multiplies_bf16,
    resolve_dtype,
    start_line,
)


@pytest.mark.parametrize("case", ["unknown flag", "missing file", "broken line"])
def test_ranks_start_only_for_flags_that_can_be(demo, case):
    """The error is all that is printed, and no rank stays. A wrong flag imports no torch."""
    arguments, parts = CASES[case]
    command = [sys.executable, "-X", "importtime", "-m", "trainer.cli", "sft", "--nproc", "2", *arguments]
    code, output, seconds = run_until_gone([*command, "--micro_train_batch_size", "4"], cwd=demo, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in output.splitlines() if "import time:" in line}
    printed = [line for line in output.splitlines() if "import time:" not in line]
    assert code == 2 and printed[-1].startswith("error: ") and "Traceback" not in output, output[-3000:]
    assert_one_line(output, parts)
    assert ("torch" in imported) == (case == "broken line") and seconds < 30
    if "torch" in imported:  # the first line is printed before, and once
        [first] = [
            place for place, line in enumerate(output.splitlines()) if line.startswith("train_sft: demo/model with")
        ]
        assert not any(line.endswith(" torch") for line in output.splitlines()[:first])


def test_a_signal_to_the_command_trainer_ends_its_ranks(demo):
    """A signal before the first step: one line at most, and no traceback."""
    flags = [*MODEL, *DATA, "--max_steps", "9999", "--output_dir", "stopped", "--param_dtype", "fp32"]
    command = [sys.executable, "-m", "trainer.cli", "sft", "--nproc", "2", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=demo, start_new_session=True, env=_environment(), **streams)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[0]  # the pipe closes when every rank is gone
    dtype = "fp32" if multiplies_bf16("cpu") else f"fp32 ({NO_BF16})"
    assert lines[0].endswith(f"parameters, 2 ranks of fsdp2 dp 2, {dtype}, learning rate 5e-06, to stopped\n"), lines[0]
    stop = json.loads((demo / "stopped/metrics.jsonl").read_text().splitlines()[-1])
    assert stop["event"] == "stop" and stop["reason"] == rest.splitlines()[-1]
    assert "step/s" not in "".join(lines) + rest  # the bar is for terminals
    assert process.returncode == 75 and "Traceback" not in rest, "".join(lines)[-2000:] + rest
    assert rest.count("SIGINT") == 1 and rest.splitlines()[-1].startswith("stopped by SIGINT"), rest


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["trainer.cli.train_sft"], "SIGTERM"),
        ([*LAUNCHER[2:], "2", "-m", "trainer.cli.train_sft"], "SIGINT"),
    ],
)
def test_a_signal_before_the_first_step_is_one_line(demo, command, name):
    """Alone and under plain torchrun: while the libraries load. Every process is gone when the pipe closes."""
    flags = [*MODEL, *DATA, "--output_dir", "early", "--param_dtype", "fp32"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [sys.executable, "-m", *command, *flags]
    process = subprocess.Popen(started, cwd=demo, start_new_session=True, env=_environment(**installed()), **streams)
    first = process.stdout.readline()
    time.sleep(1)  # the other rank begins later
    os.killpg(process.pid, signal.Signals[name])
    rest = process.communicate(timeout=120)[0]
    assert first.startswith("train_sft: demo/model with") and process.returncode == 75, first + rest
    assert rest.splitlines()[-1] == f"stopped by {name}; no step was running, so no checkpoint was saved"
    assert rest.count(name) == 1 and "Traceback" not in rest and not (demo / "early").exists(), rest


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """{rank: process} of those that torchrun has started."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            names = dict(
                part.split("=", 1) for part in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in part
            )
            found |= {int(names["RANK"]): int(child)} if "RANK" in names else {}
    return found


@pytest.mark.parametrize(
    ("command", "whom"),
    [
        (["trainer.cli", "sft", "--nproc", "2"], "the launcher"),
        ([*LAUNCHER[2:], "2", "-m", "trainer.cli.train_sft"], "all"),
        ([*LAUNCHER[2:], "2", "-m", "trainer.cli.train_sft"], "rank 1"),
    ],
)
def test_sigterm_while_two_ranks_load_is_one_line(demo, command, whom):
    """No rank stays, whoever got the signal: the pipe closes when every process is gone."""
    flags = [*MODEL, *DATA, "--output_dir", "loads", "--param_dtype", "fp32"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [sys.executable, "-m", *command, *flags]
    process = subprocess.Popen(started, cwd=demo, start_new_session=True, env=_environment(**installed()), **streams)
    deadline = time.monotonic() + 60
    while len(ranks := ranks_of(process)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    if whom == "all":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.kill(process.pid if whom == "the launcher" else ranks[1], signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and "Traceback" not in output and "error" not in output, output
    assert output.splitlines()[-1] == "stopped by SIGTERM; no step was running, so no checkpoint was saved"
    assert output.count("SIGTERM") == 1 and len(ranks) == 2 and not (demo / "loads").exists(), output


@pytest.mark.parametrize(("flags", "goal"), [(["--learning_rat", "1"], 1.5), ([*MODEL, *DATA], 2.0)])
def test_a_typo_and_the_first_line_come_at_once(demo, flags, goal):
    """`goal` is in seconds. On a quiet machine, they are those of a clock. Others may use this one: they are of its CPU."""
    clock, cpu, command = [], [], [sys.executable, "-m", "trainer.cli", "sft", *flags]
    for _ in range(3):
        begin = time.monotonic()
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=demo, env=_environment(), **streams) as process:
            line = process.stdout.readline()
            clock.append(time.monotonic() - begin)
            # Not `process.kill`: where the process has ended, that takes its exit status, and `wait4` would find no child.
            os.kill(process.pid, signal.SIGKILL)
            process.returncode, used = os.wait4(process.pid, 0)[1:]
            cpu.append(used.ru_utime + used.ru_stime)
        assert line.startswith((b"error: --learning_rat: ", b"train_sft: demo/model")), line
    print(f"{' '.join(flags)}: {sorted(clock)} s, {sorted(cpu)} s of CPU, load {os.getloadavg()[0]:.1f}")
    assert 0 < min(cpu) < goal and sorted(clock)[1] < 3 * goal, (clock, cpu)


@pytest.mark.parametrize(("rank", "said"), [("0", "stopped by SIGINT; no step was running"), ("1", "")])
def test_a_signal_while_a_rank_imports_its_command_has_no_traceback(rank, said):
    code, output = run_process([sys.executable, "-c", "import trainer.cli; raise KeyboardInterrupt"], RANK=rank)
    assert code == 75 and output.startswith(said) and len(output.splitlines()) == bool(said), output


@pytest.mark.parametrize(
    ("facts", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd atomics\n", False),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("model name\t: A CPU with bf16\nflags\t\t: avx2\n", False),
    ],
)
def test_auto_is_bf16_only_where_the_cpu_has_its_instructions(tmp_path, monkeypatch, facts, fast):
    (tmp_path / "cpuinfo").write_text(facts)
    assert multiplies_bf16("cpu", str(tmp_path / "cpuinfo")) is fast
    monkeypatch.setattr("trainer.runs.start_line.multiplies_bf16", lambda device: fast)
    assert resolve_dtype("auto", "cpu") == ("bf16" if fast else "fp32")
    assert [resolve_dtype(name, "cpu") for name in ("bf16", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]


@pytest.mark.parametrize(
    ("version", "hidden", "driver", "reason"),
    [
        ("2.13.0+cpu", None, True, "torch 2.13.0+cpu is a build without CUDA"),
        ("2.13.0", "", True, "CUDA_VISIBLE_DEVICES hides all GPUs"),
        ("2.13.0+cu130", "0", False, "this machine has no NVIDIA driver (libcuda.so.1)"),
        ("2.13.0+cu130", "0", True, ""),
        ("2.13.0+rocm7", None, False, ""),
    ],
)
def test_a_gpu_that_cannot_be_there_is_refused_before_torch(monkeypatch, version, hidden, driver, reason):
    def load(name):
        if name and not driver:
            raise OSError(name)

    monkeypatch.setattr(start_line_of_run.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(start_line_of_run.ctypes, "CDLL", load)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(UserError) if reason else contextlib.nullcontext() as refused:
        check_flags(
            "train_sft", parse_arguments(COMMANDS["train_sft"], "train_sft", ["--device", "cuda"]), ("eval_loss",)
        )
    assert not reason or str(refused.value) == f"--device: cuda, but {reason} (allowed: cpu, auto)"


def test_parameters_are_counted_from_the_headers_of_files(demo, tmp_path, monkeypatch):
    weights = load_file(demo / "demo/model/model.safetensors")
    total = sum(tensor.numel() for tensor in weights.values())
    assert count_parameters(demo / "demo/model") == total > 0
    (tmp_path / "config.json").write_text("{}")
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: names[i % 2] for i, name in enumerate(weights)}
    for file in names:
        save_file({name: weights[name] for name in weights if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert count_parameters(tmp_path) == total
    snapshot = tmp_path / "models--org--tiny/snapshots/abc"
    (tmp_path / "models--org--tiny/refs").mkdir(parents=True)
    (tmp_path / "models--org--tiny/refs/main").write_text("abc")
    shutil.copytree(demo / "demo/model", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert count_parameters(folder_here("org/tiny")) == total and folder_here("org/none") == Path("org/none")
    assert folder_here(str(tmp_path)) == tmp_path
    (tmp_path / names[0]).write_bytes(b"broken")
    assert count_parameters(tmp_path) is None and count_parameters(tmp_path / "none") is None


def test_the_first_line_of_a_resumed_run_says_where_it_goes_on(tmp_path):
    for name in ("step_8", "step_12"):
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    latest = [f"{tmp_path}/run, going on from step_12", f"{tmp_path}/new"]
    for value, end in zip(
        ["latest", "latest", "old/step_8", None],
        [*latest, f"{tmp_path}/run, going on from old/step_8", f"{tmp_path}/run"],
    ):
        folder = end.partition(",")[0]
        flags = {
            "pretrain": "m",
            "dataset": "d",
            "learning_rate": 1,
            "micro_train_batch_size": 8,
            "load_checkpoint": value,
            "output_dir": folder,
        }
        args = from_flat(COMMANDS["train_ppo"], flags)
        assert start_line("train_ppo", args, None).endswith(f", to {end}")
        assert start_line("train_ppo", args, None, trains=False).endswith(f", to {folder}")


def test_a_long_first_sample_is_printed_without_its_middle():
    text = "a" * 30_000 + "b" * 30_000
    assert shortened(text[:2000]) == text[:2000]
    assert shortened(text) == "a" * 1000 + "\n... 58000 characters ...\n" + "b" * 1000


@pytest.mark.parametrize(
    ("command", "rank", "rate"),
    [
        ("train_sft", None, 5e-6), ("train_sft", 8, 2e-4), ("train_rm", None, 5e-6), ("train_dpo", None, 5e-7),
        ("train_dpo", 8, 5e-6), ("train_ppo", None, 1e-6), ("train_ppo", 8, 1e-5), ("train_dpo --online", None, 5e-7),
    ],
)  # fmt: skip
def test_the_default_rate_is_that_of_the_method(command, rank, rate):
    args = from_flat(COMMANDS[command], {"pretrain": "m", "dataset": "d", "lora_rank": rank, "device": "cpu"})
    check_flags(command, args, ("eval_loss",))
    assert args.optimizer.learning_rate == rate and f", learning rate {rate:g}, " in start_line(command, args, None)
    assert "learning rate" not in start_line(command, args, None, trains=False)  # of evaluate
    given = from_flat(COMMANDS[command], {"pretrain": "m", "dataset": "d", "lora_rank": rank, "learning_rate": 0.5})
    check_flags(command, given, ("eval_loss",))
    assert given.optimizer.learning_rate == 0.5


@pytest.mark.parametrize(
    ("samples", "ranks", "given", "micro"),
    [(128, 1, None, 8), (4, 1, None, 4), (20, 2, None, 5), (22, 2, None, 1), (128, 2, 2, 2), (16, 4, None, 4)],
)
def test_micro_batches_follow_a_small_batch_and_are_named(samples, ranks, given, micro, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    flags = {"pretrain": "m", "dataset": "d", "train_batch_size": samples, "micro_train_batch_size": given}
    for layout in ("flags", "auto"):
        args = from_flat(COMMANDS["train_sft"], {**flags, "layout": layout})
        check_flags("train_sft", args, ("eval_loss",))
        assert args.batch.micro_train_batch_size == micro
        line = start_line("train_sft", args, None)
        named = f", {micro} of the {samples} samples of a step in a forward pass of a rank, " in line
        assert named == (micro < 8 and micro * ranks < samples)  # else a step is one forward pass
    args = from_flat(COMMANDS["train_sft"], {**flags, "train_batch_size": 2 * ranks + 1, "micro_train_batch_size": 2})
    with pytest.raises(UserError, match="not a multiple of --micro_train_batch_size 2"):
        check_flags("train_sft", args, ("eval_loss",))
    with pytest.raises(UserError, match="--limits: nonsense=3"):
        check_flags("train_sft", from_flat(COMMANDS["train_sft"], {**flags, "limits": ["nonsense=3"]}), ("eval_loss",))


def test_tokens_or_samples_say_how_large_a_micro_batch_is():
    """Only a given number of samples is refused, also when the checks are made again: config.yaml then has no other."""
    flags = {"pretrain": "m", "dataset": "d", "max_tokens_per_micro_batch": 600}
    for command in ("train_sft", "train_ppo"):
        more = {"reward_func": "math", "rollout_batch_size": 128} if command == "train_ppo" else {}
        args = from_flat(COMMANDS[command], {**flags, **more})
        for _ in range(2):
            check_flags(command, args, ("eval_loss",) if not more else ("eval_reward",))
            assert args.batch.micro_train_batch_size is None
        assert "in a forward pass" not in start_line(command, args, None)
        both = from_flat(COMMANDS[command], {**flags, **more, "micro_train_batch_size": 8})
        with pytest.raises(UserError, match="--micro_train_batch_size 8 with --max_tokens_per_micro_batch: both say"):
            check_flags(command, both, ("eval_loss",))


def test_a_closed_folder_and_a_file_without_a_flag_are_refused_before_torch(tmp_path, monkeypatch):
    closed, files = tmp_path / "closed", {"dataset": str(tmp_path / "data.jsonl"), "pretrain": str(tmp_path)}
    closed.mkdir()
    may = os.access
    monkeypatch.setattr("os.access", lambda path, mode: path != closed and may(path, mode))  # root may write everywhere
    for folder in (closed, closed / "new/run"):
        args = from_flat(COMMANDS["train_sft"], {**files, "output_dir": str(folder)})
        with pytest.raises(UserError, match=f"--output_dir: {folder}: {closed} is closed to this user"):
            check_files_of(args)
    check_rights(str(tmp_path / "new/run"))
    with pytest.raises(UserError, match=r"^axolotl.yml: a file without a flag. Did you mean --config axolotl.yml\?$"):
        parse_arguments(COMMANDS["train_sft"], "train_sft", ["axolotl.yml", "--max_steps", "2"])


@pytest.mark.parametrize(
    ("command", "flags", "found"),
    [
        ("make_demo", "--output_dir /proc/none", "--output_dir: /proc/none: /proc takes no new file"),
        ("export", "nowhere OUT", r"SOURCE: \S*/nowhere: no such folder"),
        ("export", "{0} {0}", "OUT: .* exists already"),
        ("export", "{0} /proc/none", "OUT: /proc/none: /proc takes no new file"),
        ("prepare_data", "", "--pretrain: missing .allowed: a folder or hub name with the tokenizer"),
        ("prepare_data", "--pretrain {0} --dataset {0} --output_dir {0}/new --limits columns=x", "--limits: columns=x"),
        ("prepare_data", "--pretrain {0} --dataset none.jsonl --output_dir {0}/new", "--dataset none.jsonl: file not"),
    ],
)
def test_places_are_looked_at_before_torch_is_imported(tmp_path, monkeypatch, command, flags, found):
    door = importlib.import_module(f"trainer.cli.{command}")

    def no_libraries():
        raise AssertionError("the libraries are imported first")

    monkeypatch.setattr(door, "quiet_libraries", no_libraries)
    with pytest.raises(UserError, match=f"^{found}"):
        door.run(flags.format(tmp_path).split())
    with pytest.raises(UserError, match=r"^--output_dir: /proc/none/x: /proc "):
        check_rights("/proc/none/x")


@pytest.mark.parametrize(
    "line",
    [
        *("export x y", "verify_run x", "report x", "watch x", "check x", "plan x --gpus 1", "serve_rm"),
        *("serve_engine --pretrain x", "serve_train --pretrain x", "evaluate {0}", "train_ppo {0} --dataset x"),
    ],
)
def test_commands_that_read_what_others_wrote_have_limits(line):
    """A wrong name is found before anything is read."""
    given = "--pretrain x --eval_dataset x --reward_func exact_match --label_key x"
    command, *rest = line.format(given).split()
    door = importlib.import_module(f"trainer.cli.{command}")
    for words in ([*rest, "--limits", "pixel=5"], ["--limits", "values=5", "pixel=5", *rest]):
        with pytest.raises(UserError, match=r"^--limits: pixel=5 "):
            door.run(words)


def test_a_folder_without_a_tokenizer_is_named(demo, tmp_path):
    """transformers makes an empty tokenizer for some models, and has a long text for others."""
    config = json.loads((demo / "demo/model/config.json").read_text())
    for kind in (config["model_type"], "llama"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        with pytest.raises(UserError, match=r"contains no tokenizer \(allowed"):
            load_tokenizer(str(tmp_path))


def test_the_scale_of_an_adapter_is_for_adapters_only(demo):
    flags = ["--pretrain", str(demo / "demo/model"), "--port", "0"]
    assert serve_train.check(flags)[0].lora.lora_alpha is None
    assert serve_train.check([*flags, "--lora_rank", "4"])[0].lora.lora_alpha == 32
    with pytest.raises(UserError, match="--lora_alpha 32 without --lora_rank"):
        serve_train.check([*flags, "--lora_alpha", "32"])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"RANK": "0"}, "RANK: is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: is set without RANK"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ""),
    ],
)
def test_variables_that_another_tool_left_are_named(monkeypatch, given, found):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, given[name]) if name in given else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=found) if found else contextlib.nullcontext():
        check_launcher()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' .allowed: a number, as torchrun sets it; or unset WORLD_SIZE"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: '-1'"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK: 3 with WORLD_SIZE 2 .allowed: a number below"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
    ],
)
def test_numbers_of_ranks_that_no_launcher_gives_are_refused(monkeypatch, given, found):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, given[name]) if name in given else monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=found) if found else contextlib.nullcontext():
        check_ranks_given()


def test_a_start_that_failed_does_not_occupy_its_folder(tmp_path):
    """Of a run that made no step, the same command may be given again; its rows are replaced."""
    metrics = tmp_path / "metrics.jsonl"
    for row, holds in (("", False), ({"event": "stop", "reason": "x"}, False), ({"step": 1, "loss": 2.0}, True)):
        rows = [{"event": "start", "config": {}}, row] if row else []
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert holds_run(str(tmp_path)) == holds
        if holds:
            with pytest.raises(UserError, match="holds another run"):
                open_folder(str(tmp_path), overwrite=False, resumes=False)
        else:
            open_folder(str(tmp_path), overwrite=False, resumes=False)
            assert not metrics.exists()
    metrics.unlink()
    (tmp_path / "rollouts.jsonl").write_text("")
    assert holds_run(str(tmp_path))


def test_a_wrong_checkpoint_is_found_before_torch(tmp_path):
    (tmp_path / "data.jsonl").write_text("{}")
    files = {"dataset": str(tmp_path / "data.jsonl"), "pretrain": str(tmp_path), "output_dir": str(tmp_path / "run")}
    args = from_flat(COMMANDS["train_sft"], {**files, "load_checkpoint": "true"})
    with pytest.raises(UserError, match="--load_checkpoint: true is not a folder"):
        check_files_of(args)
    for name in ("run/checkpoints/step_2", "run/checkpoints/step_10", "run/model"):
        (tmp_path / name).mkdir(parents=True)
    for named in ("run", "run/checkpoints", "run/model"):
        args = from_flat(COMMANDS["train_sft"], {**files, "load_checkpoint": str(tmp_path / named)})
        with pytest.raises(
            UserError, match=rf"{named} is no checkpoint. Did you mean {tmp_path}/run/checkpoints/step_10\?"
        ):
            check_files_of(args)


def test_the_package_is_the_command():
    code, output = run_process([sys.executable, "-m", "trainer", "grpo"])
    assert (code, output) == (2, "error: grpo: no such command. Write: trainer ppo --preset grpo\n")


FORKS = """
import os, signal, sys, time
from trainer.entry import end_in_a_line_at_sigterm
from trainer.training.stop_request import StopRequest
end_in_a_line_at_sigterm()
with StopRequest() if sys.argv[1] == "steps" else open(os.devnull):
    ready, tells = os.pipe()
    child = os.fork()
    if not child:
        os.write(tells, b"1" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else b"0")
        time.sleep(60)
    print("the kernel's" if os.read(ready, 1) == b"1" else "Python's")  # before its first line, Python forgets signals
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("when", ["start", "steps"])
def test_a_forked_worker_dies_of_sigterm_without_a_word(when):
    """As a pool of processes ends its workers: they are no runs that could save.

    Python would run no handler if the signal came just before the worker's long sleep.
    """
    code, output = run_process([sys.executable, "-c", FORKS, when], timeout=50)
    assert (code, output) == (0, "the kernel's\n-15\n")


@pytest.mark.parametrize(("ranks", "said"), [("1", "stopped by SIGTERM"), ("2", "")])
def test_only_a_run_of_one_rank_ends_in_a_line_at_sigterm(ranks, said):
    """Of several ranks, as under srun, the other ones would wait for a rank that left with a line."""
    code = "import os; from trainer.runs.start_line import begin; begin('train_sft', None); os.kill(os.getpid(), 15)"
    places = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    code, output = run_process([sys.executable, "-c", code], WORLD_SIZE=ranks, TRAINER_ANNOUNCED="1", **places)
    assert code == (75 if said else -15) and output.startswith(said) and bool(output) == bool(said), output


SAVES = """
import os, signal, sys
from trainer import entry
from trainer.cli import train_sft
from trainer.runs import outputs
def killed(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    write(*args)
write, outputs.write_model_card = outputs.write_model_card, killed
entry.run_command(train_sft.run)
"""


def test_a_signal_during_the_last_save_leaves_a_whole_run(demo):
    flags = [*MODEL, *DATA, "--max_steps", "1", "--output_dir", "late", "--certificate"]
    code, output = run_process([sys.executable, "-c", SAVES, *flags, "--train_batch_size", "8"], cwd=demo)
    assert code == 0 and "SIGTERM: the run is over and writes its model" in output, output[-3000:]
    assert json.loads((demo / "late/metrics.jsonl").read_text().splitlines()[-1])["event"] == "end"
    assert (demo / "late/model/README.md").exists() and (demo / "late/certificate.json").exists()

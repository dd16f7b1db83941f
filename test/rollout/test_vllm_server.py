"""--rollout_engine vllm_server: real servers of vLLM on the CPU, with weights over gloo. Run by test/run_vllm_tests.sh."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm")

from launch import ROOT, read_rows, read_steps, run_process, train_many

from trainer.datasets.demo import make_demo
from trainer.rollout.rollouts_file import read_rollouts

STEPS, SAMPLES = 4, 16
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextlib.contextmanager
def serving(folder, port: int, model: str = "demo/model"):
    """A server of a model in `folder`. Its whole process group is killed at the end."""
    command = [
        sys.executable,
        "-m",
        "trainer.cli.serve_engine",
        "--pretrain",
        f"{folder}/{model}",
        "--port",
        str(port),
    ]
    command += ["--max_len", "128", "--batch_size", "16", "--param_dtype", "fp32"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def flags(folder, name: str, *more: str) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--label_key", "label", "--reward_func", f"{folder}/reward.py", "--param_dtype", "fp32", "--no_save"]
    line += ["--max_samples", "24", "--advantage_estimator", "group_norm", "--prompt_max_len", "64"]
    line += ["--generate_max_len", "8", "--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--tis_cap", "2"]
    line += ["--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "8", "--learning_rate", "1e-2"]
    line += ["--lr_scheduler", "constant", "--max_steps", str(STEPS), "--num_episodes", "2"]
    return ["train_ppo", *line, "--output_dir", str(folder / name), *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two ranks with one server and without, then one rank that trains while its server generates, and the replay."""
    folder, port = tmp_path_factory.mktemp("vllm_server"), free_port()
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    server = ["--rollout_engine", "vllm_server", "--engine_urls", f"http://127.0.0.1:{port}"]
    frozen = ["--rollouts_from", f"{folder}/ahead/rollouts.jsonl"]
    with serving(folder, port):
        train_many(2, [flags(folder, "server", *server)], folder, timeout=300)
        ahead = flags(folder, "ahead", *server, "--max_staleness", "2", "--save_steps", "2")
        train_many(1, [ahead, flags(folder, "replay", *frozen)], folder, timeout=300)
    train_many(2, [flags(folder, "inside", "--rollout_engine", "vllm")], folder, timeout=300)
    line = flags(folder, "gone", *server)[1:]
    return folder, run_process([sys.executable, "-m", "trainer.cli.train_ppo", *line], timeout=200)


def test_a_server_draws_the_samples_of_the_engine_inside(runs):
    folder, _ = runs
    inside, server = (read_rollouts(f"{folder}/{name}/rollouts.jsonl") for name in ("inside", "server"))
    assert len(server) == STEPS
    for mine, other in zip(server, inside, strict=True):
        assert [sample.response_ids for sample in mine] == [sample.response_ids for sample in other]
        assert [sample.finished for sample in mine] == [sample.finished for sample in other]
    for row, other in zip(read_steps(folder / "server"), read_steps(folder / "inside"), strict=True):
        assert abs(row["loss"] - other["loss"]) <= 1e-5 * max(1, row["advantage_abs"])
        assert abs(row["grad_norm"] - other["grad_norm"]) <= 1e-4 * other["grad_norm"]
        assert row["rollout_logprob_diff_max"] < 1e-4, "the server has other weights than training"
    checksums = [row["weights_checksum"] for row in read_rows(folder / "server") if "loss" in row]
    assert len(set(checksums)) == STEPS


def test_training_goes_on_while_the_server_generates(runs):
    folder, _ = runs
    rows, replayed = read_steps(folder / "ahead"), read_steps(folder / "replay")
    assert len(rows) == STEPS and max(row["staleness_max"] for row in rows) in (1, 2)
    for row, other in zip(rows, replayed, strict=True):
        assert all(row[key] == other[key] for key in ("loss", "grad_norm", "tis_weight", "staleness", "batch_hash"))
    assert any(row["rollout_logprob_diff"] > 1e-3 for row in rows)


def test_a_server_that_is_gone_is_one_line(runs):
    _, (code, output) = runs
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in output, output[-3000:]
    assert error.startswith("error: --engine_urls: http://127.0.0.1:") and "Connection refused" in error, error

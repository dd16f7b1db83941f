"""--rollout_engine vllm_server: real servers of vLLM on the CPU, with weights over gloo. Run by test/run_vllm_tests.sh."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("vllm")

from launch import ROOT, read_rows, read_steps, run_process, torchrun, train_many

from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo
from trainer.rollout.rollouts_file import read_rollouts

STEPS, SAMPLES = 4, 16
REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
"""


# Rank 0 kills a server behind the first rollout, starts it again in the third, and waits for it.
KILLING = (
    REWARD
    + """
import json, os, pathlib, signal, subprocess, time, urllib.request
calls, folder = [], pathlib.Path(__file__).parent
score = reward_func
def reward_func(prompts, responses, labels):
    calls.append(1)
    asked = json.loads((folder / "second.json").read_text())
    if os.environ["RANK"] == "0" and len(calls) == 1:
        os.kill(asked["pid"], signal.SIGKILL)
    if os.environ["RANK"] == "0" and len(calls) == 3:
        ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH")  # a rank's, not a server's
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # else it would keep the run's output open
        process = subprocess.Popen(asked["command"], env=env, start_new_session=True, **quiet)
        (folder / "third.json").write_text(str(process.pid))
        while True:
            try:
                urllib.request.urlopen(asked["url"] + "/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.5)
    return score(prompts, responses, labels)
"""
)


def command_of(folder, port: int, model: str = "demo/model") -> list[str]:
    command = [sys.executable, "-m", "trainer.cli.serve_engine", "--pretrain", f"{folder}/{model}"]
    return [*command, *f"--port {port} --max_len 256 --batch_size 16 --param_dtype fp32".split()]


@contextlib.contextmanager
def serving(folder, *ports: int, model: str = "demo/model"):
    """A server of a model in `folder` at each port. Their whole process groups are killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    servers = []
    for port in ports:
        with (folder / f"server-{port}.log").open("w") as out:
            streams = {"stdout": out, "stderr": out, "env": environment, "start_new_session": True}
            servers.append(subprocess.Popen(command_of(folder, port, model), **streams))
    try:
        deadline = time.monotonic() + 300
        for port, process in zip(ports, servers):
            while not answers(port):
                log = folder / f"server-{port}.log"
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                time.sleep(1)
        yield servers
    finally:
        for process in servers:
            kill_group(process.pid)
            process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
        return True
    return False


def cached(url: str, mark: str) -> int:
    """How many tokens of a prompt the server had read before, for requests with this mark."""
    body = {"token_ids": [*range(5, 205)], "sampling_params": {"max_tokens": 1}, "cache_salt": mark}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)
    usage = json.loads(urllib.request.urlopen(request, timeout=60).read())["usage"]
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def flags(folder, name: str, *more: str) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--label_key", "label", "--reward_func", f"{folder}/reward.py", "--param_dtype", "fp32", "--no_save"]
    line += ["--max_samples", "24", "--advantage_estimator", "group_norm", "--prompt_max_len", "64"]
    line += ["--generate_max_len", "8", "--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--tis_cap", "2"]
    line += ["--train_batch_size", str(SAMPLES), "--micro_train_batch_size", "8", "--learning_rate", "1e-2"]
    line += ["--lr_scheduler", "constant", "--max_steps", str(STEPS), "--num_episodes", "2"]
    return ["train_ppo", *line, "--output_dir", str(folder / name), *more]


def long_prompts(folder) -> list[dict]:
    """Prompts of more than 128 tokens, a block of the cache that a server keeps of prompts."""
    rows = [json.loads(line) for line in (folder / "demo/prompts.jsonl").read_text().splitlines()[:8]]
    for row in rows:
        row["messages"][0]["content"] = ((row["messages"][0]["content"] + " ") * 80)[:500]
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two ranks with one server and without, then one rank that trains while its server generates, and the replay; then
    two ranks with two servers, one of which dies and comes back."""
    folder, port, second = tmp_path_factory.mktemp("vllm_server"), free_port(), free_port()
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "killing.py").write_text(KILLING)
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long_prompts(folder)))
    url, other = (f"http://127.0.0.1:{number}" for number in (port, second))
    server = ["--rollout_engine", "vllm_server", "--engine_urls", url]
    cut = ["--top_k", "20", "--top_p", "0.95", "--min_p", "0.001"]
    long = ["--dataset", f"{folder}/long.jsonl", "--prompt_max_len", "240", "--num_episodes", str(STEPS)]
    frozen = ["--rollouts_from", f"{folder}/ahead/rollouts.jsonl"]
    with serving(folder, port, second) as (_, victim):
        (folder / "cached.json").write_text(json.dumps([cached(url, mark) for mark in ("one", "one", "two")]))
        asked = {"pid": victim.pid, "command": command_of(folder, second), "url": other}
        (folder / "second.json").write_text(json.dumps(asked))
        train_many(
            2,
            [
                flags(folder, "server", *server),
                flags(folder, "cut", *server, *cut),
                flags(folder, "long", *server, *long),
            ],
            folder,
            timeout=300,
            launch=torchrun,
        )
        killing = ["--reward_func", f"{folder}/killing.py", "--engine_urls", f"{url},{other}"]
        killing += ["--sync_deltas", "--reward_timeout", "300"]
        output = train_many(
            2,
            [flags(folder, "killed", *server, *killing)],
            folder,
            timeout=500,
            launch=torchrun,
        )
        (folder / "killed.log").write_text(output)
        kill_group(int((folder / "third.json").read_text()))
        ahead = flags(folder, "ahead", *server, "--max_staleness", "2", "--save_steps", "2")
        long = ["--generate_max_len", "180"]  # so that new weights come before the end of a response
        partial = flags(folder, "partial", *server, "--max_staleness", "2", "--partial_rollouts", *long)
        again = ["--rollouts_from", f"{folder}/partial/rollouts.jsonl"]
        lines = [ahead, flags(folder, "replay", *frozen), partial, flags(folder, "partial-replay", *again, *long)]
        train_many(1, lines, folder, timeout=300, launch=torchrun)
    inside = ["--rollout_engine", "vllm"]
    lines = [flags(folder, "inside", *inside), flags(folder, "cut-inside", *inside, *cut)]
    train_many(2, lines, folder, timeout=300, launch=torchrun)
    line = flags(folder, "gone", *server)[1:]
    return folder, run_process([sys.executable, "-m", "trainer.cli.train_ppo", *line], timeout=200)


@pytest.mark.parametrize("name", ["server", "cut"])
def test_a_server_draws_the_samples_of_the_engine_inside(runs, name):
    folder, _ = runs
    other = {"server": "inside", "cut": "cut-inside"}[name]
    inside, server = (read_rollouts(f"{folder}/{run}/rollouts.jsonl") for run in (other, name))
    assert len(server) == STEPS
    for mine, theirs in zip(server, inside, strict=True):
        assert [sample.response_ids for sample in mine] == [sample.response_ids for sample in theirs]
        assert [sample.finished for sample in mine] == [sample.finished for sample in theirs]
        assert [sample.kept_ids for sample in mine] == [sample.kept_ids for sample in theirs]
        assert all(bool(sample.kept_ids) == (name == "cut") for sample in mine)
    for row, expected in zip(read_steps(folder / name), read_steps(folder / other), strict=True):
        assert abs(row["loss"] - expected["loss"]) <= 1e-5 * max(1, row["advantage_abs"])
        assert abs(row["grad_norm"] - expected["grad_norm"]) <= 1e-4 * expected["grad_norm"]
        assert row["rollout_logprob_diff_max"] < 1e-4, "the server has other weights than training"
    checksums = [row["weights_checksum"] for row in read_rows(folder / name) if "loss" in row]
    assert len(set(checksums)) == STEPS


def test_a_server_reads_a_prompt_once_and_again_with_new_weights(runs):
    """Two samples of a prompt need one reading. Each rollout has the same prompts, under other weights."""
    folder, _ = runs
    first, again, other = json.loads((folder / "cached.json").read_text())
    assert first == other == 0 < 128 <= again, "tokens of a prompt of 200 that the server had read before"
    first, *_, last = read_rollouts(f"{folder}/long/rollouts.jsonl")
    assert {tuple(sample.prompt_ids) for sample in first} == {tuple(sample.prompt_ids) for sample in last}
    assert min(len(sample.prompt_ids) for sample in first) > 129
    assert all(row["rollout_logprob_diff_max"] < 1e-4 for row in read_steps(folder / "long"))


def test_a_server_that_dies_and_one_that_is_back_change_no_sample(runs):
    folder, _ = runs
    output = (folder / "killed.log").read_text()
    assert output.count("rollout server lost") >= 1 and output.count("is back") >= 1, output[-3000:]
    undisturbed, killed = (read_rollouts(f"{folder}/{name}/rollouts.jsonl") for name in ("server", "killed"))
    assert len(killed) == STEPS
    for mine, other in zip(killed, undisturbed, strict=True):
        for sample, expected in zip(mine, other, strict=True):
            assert (sample.response_ids, sample.score) == (expected.response_ids, expected.score)
            # other requests are in a batch of the server, so the last digits of fp32 differ
            assert sample.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    for row, other in zip(read_steps(folder / "killed"), read_steps(folder / "server"), strict=True):
        assert abs(row["loss"] - other["loss"]) <= 1e-5 * max(1, row["advantage_abs"])
        assert abs(row["grad_norm"] - other["grad_norm"]) <= 1e-4 * other["grad_norm"]
    left = subprocess.run(["pgrep", "-f", f"{folder}/demo/model"], capture_output=True, text=True).stdout.split()
    assert not left, "the killed server left a process behind"


@pytest.mark.parametrize("way", ["ahead", "partial"])
def test_training_goes_on_while_the_server_generates(runs, way):
    folder, _ = runs
    replay = {"ahead": "replay", "partial": "partial-replay"}[way]
    rows, replayed = read_steps(folder / way), read_steps(folder / replay)
    assert len(rows) == STEPS and max(row["staleness_max"] for row in rows) in (1, 2)
    for row, other in zip(rows, replayed, strict=True):
        assert all(row[key] == other[key] for key in ("loss", "grad_norm", "tis_weight", "staleness", "batch_hash"))
    assert any(row["rollout_logprob_diff"] > 1e-3 for row in rows)
    assert (max(row["resumed_fraction"] for row in rows) > 0) == (way == "partial"), "requests go on from their tokens"


def test_a_server_that_is_gone_is_one_line(runs):
    _, (code, output) = runs
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in output, output[-3000:]
    assert error.startswith("error: --engine_urls: http://127.0.0.1:") and "Connection refused" in error, error

"""A run folder has one writer, and ranks do not outlive their torchrun or hang. Nodes must share the folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_test import children, start, wait_for
from launch import ROOT, _environment, installed, run_process

from trainer.compare.runs.launch import free_port
from trainer.datasets.demos.demo import make_demo

GONE_WITHIN_SECONDS = 10


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo(str(folder))
    return folder


def command_line(demo: Path, output_dir: str, *flags: str) -> list[str]:
    line = ["-m", "trainer.cli.train_sft", "--pretrain", str(demo / "model"), "--dataset", str(demo / "sft.jsonl")]
    line += ["--apply_chat_template", "--max_steps", "100000", "--max_epochs", "100000", "--train_batch_size", "8"]
    return [*line, "--micro_train_batch_size", "4", "--no_save", "--output_dir", output_dir, *flags]


def alive(pid: int) -> bool:
    """A zombie waits for a parent that never asks; it holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_ranks_end_with_their_torchrun_and_a_second_run_is_refused_before(backend, demo, tmp_path):
    line = command_line(demo, str(tmp_path / "run"), "--backend", backend)
    log = tmp_path / "run/metrics.jsonl"
    process = start(line, tmp_path / "log.txt")
    try:
        assert wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process, 240), "no steps"
        ranks = children(process.pid)
        assert len(ranks) == 2 and all(map(alive, ranks))
        if backend == "fsdp2":  # the lock knows nothing of the backend
            holder = (tmp_path / "run/.lock").read_text()
            code, output = run_process([sys.executable, *line, "--overwrite"])
            assert code == 2 and f"{tmp_path}/run is being written by another run ({holder})" in output, output
            assert "Traceback" not in output and all(map(alive, ranks))
    finally:
        os.kill(process.pid, signal.SIGKILL)  # torchrun alone
        process.wait()
    killed = time.monotonic()
    while any(map(alive, ranks)) and time.monotonic() < killed + GONE_WITHIN_SECONDS:
        time.sleep(0.05)
    left = [pid for pid in ranks if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "ranks outlive their torchrun"
    rows = [json.loads(row) for row in log.read_text().splitlines() if row.endswith("}")]
    assert rows[0]["event"] == "start"


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_a_run_that_hangs_is_ended_and_says_where_it_stands(backend, demo, tmp_path):
    line = command_line(demo, str(tmp_path / "run"), "--backend", backend, "--heartbeat_timeout", "20")
    log, text = tmp_path / "run/metrics.jsonl", tmp_path / "log.txt"
    process = start(line, text, **installed())
    try:
        assert wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process, 240), "no steps"
        stopped = children(process.pid)[1]
        os.kill(stopped, signal.SIGSTOP)  # the other rank waits for it in a collective
        assert wait_for(
            lambda: "error: --heartbeat_timeout: rank 0 made no progress for 20 s" in text.read_text(), process, 60
        )
        os.kill(stopped, signal.SIGCONT)  # or torchrun would wait 30 s until it kills it
        assert process.wait(timeout=60) == 2
    finally:
        process.kill()
    told = text.read_text().partition("It stands here:")[2]
    assert "trainer/training/loop.py" in told, told[-3000:]


def test_a_folder_that_nodes_do_not_share_is_one_line(demo, tmp_path):
    """Two torchrun agents in working directories of their own: the same relative folder is two folders."""
    port, outputs = free_port(), []
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
        command += ["--node-rank", str(node), "--master-addr", "localhost", "--master-port", str(port)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": _environment()}
        line = command_line(demo, "run", "--backend", "fsdp2")
        outputs.append(subprocess.Popen([*command, *line], cwd=tmp_path / f"node{node}", **streams))
    try:
        texts = [process.communicate(timeout=240)[0] for process in outputs]
    finally:
        for process in outputs:
            process.kill()
    assert "run is not the same folder on all nodes" in texts[0] + texts[1], texts
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT / "trainer") not in texts[0] + texts[1]
    assert not (tmp_path / "node0/run/metrics.jsonl").exists()

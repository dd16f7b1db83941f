"""Ranks that are forked: each ending has its name, a time limit holds, and nothing stays behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from trainer.compare.machines.forked_ranks import run_ranks
from trainer.errors import UserError


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the cause")
    raise RuntimeError("Connection closed by peer")


def refuse() -> None:
    raise UserError("--flag", "a value", "another")


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (lambda: print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"]), "done", ""),
        (refuse, "refused", "--flag: a value (allowed: another)"),
        (fail_on_rank_1, "raised", "ValueError: the cause"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died", "a rank ended by SIGKILL"),
        (lambda: os._exit(3), "died", "a rank ended with code 3"),
    ],
)
def test_endings(tmp_path, function, kind, text):
    ending = run_ranks(function, 2, tmp_path / "log", timeout=60)
    assert (ending.kind, ending.text) == (kind, text)
    if kind == "done":
        assert sorted((tmp_path / "log").read_text().splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    if kind == "raised":
        assert "ValueError: the cause" in (tmp_path / "log").read_text()


def test_a_hang_is_ended_with_all_it_started(tmp_path):
    def hang() -> None:
        child = subprocess.Popen(["sleep", "100"])
        (tmp_path / f"pid{os.environ['RANK']}").write_text(str(child.pid))
        time.sleep(100)

    started = time.monotonic()
    ending = run_ranks(hang, 2, tmp_path / "log", timeout=3)
    assert (ending.kind, ending.text) == ("timed out", "no end after 3 s") and time.monotonic() - started < 20
    assert "in hang" in (tmp_path / "log").read_text()  # where it hung
    for rank in (0, 1):
        pid = int((tmp_path / f"pid{rank}").read_text())
        ended = time.monotonic() + 10
        while runs(pid) and time.monotonic() < ended:
            time.sleep(0.05)
        assert not runs(pid)


def runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False

"""Folders of weights that ranks share: each version is written once, also if a rank dies, and stays while it is read."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launch import ROOT

from trainer.rollout.engines.weight_folders import LOCK, READERS, WeightFolders

# RANK FOLDER VERSION WHAT: writes the version once, reads it for a moment, and says what it did; or stops and waits
RANK = """
import sys, time
from pathlib import Path
from trainer.rollout.engines.weight_folders import WeightFolders
_, path, version, what = sys.argv
folders = WeightFolders(path)

def fill(folder):
    Path(folder, "part").write_text("half")
    if what == "stops while it writes":
        print("writes", flush=True)
        time.sleep(60)
    time.sleep(0.2)
    Path(folder, "model.safetensors").write_text(version)
    print("wrote", flush=True)
    return version

with folders.turn():
    if not folders.has(version):
        folders.write(fill)
    reading = folders.begin_reading(version)
with reading:
    print("reads", flush=True)
    time.sleep(60 if what == "stops while it reads" else 0.3)
    assert Path(folders.folder_of(version), "model.safetensors").read_text() == version
print("read", flush=True)
if what == "stays":
    sys.stdin.readline()
folders.leave()
"""


def start(path: Path, version: str, what: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", RANK, str(path), version, what]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def said(process: subprocess.Popen, *words: str) -> None:
    for word in words:
        assert process.stdout.readline().strip() == word


def end(process: subprocess.Popen) -> list[str]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.split()


def test_ranks_that_come_together_write_once_and_remove_it_at_the_end(tmp_path):
    ranks, words = [start(tmp_path / "w", "v1", "stays") for _ in range(3)], []
    for rank in ranks:
        words.append([rank.stdout.readline().strip()])
        while words[-1][-1] != "read":
            words[-1].append(rank.stdout.readline().strip())
    assert sorted(words) == [["reads", "read"]] * 2 + [["wrote", "reads", "read"]]
    for rank in ranks:
        rank.communicate("\n", timeout=60)
        assert rank.returncode == 0
    assert not (tmp_path / "w").exists()


def test_a_rank_that_dies_while_it_writes_leaves_the_version_to_another(tmp_path):
    first = start(tmp_path / "w", "v1", "stops while it writes")
    said(first, "writes")
    second = start(tmp_path / "w", "v1")
    time.sleep(1)
    assert second.poll() is None, "it waits for the first"
    os.kill(first.pid, signal.SIGKILL)
    assert end(second) == ["wrote", "reads", "read"]
    assert not (tmp_path / "w").exists(), "what the first has begun is gone"


def test_a_version_stays_while_a_rank_reads_it_and_goes_when_that_rank_dies(tmp_path):
    slow = start(tmp_path / "w", "v1", "stops while it reads")
    said(slow, "wrote", "reads")
    assert end(start(tmp_path / "w", "v2")) == ["wrote", "reads", "read"]
    assert (tmp_path / "w/v1/model.safetensors").read_text() == "v1", "the slow one reads it"
    assert not (tmp_path / "w/v2").exists()
    os.kill(slow.pid, signal.SIGKILL)
    slow.wait()
    assert end(start(tmp_path / "w", "v3")) == ["wrote", "reads", "read"]
    assert not (tmp_path / "w").exists()


def test_the_former_version_goes_before_a_new_one_is_written(tmp_path):
    folders, held = WeightFolders(str(tmp_path / "w")), []

    def fill(folder: str) -> str:
        held.append(sorted(set(os.listdir(folders.path)) - {LOCK}))
        return f"v{len(held)}"

    for _ in range(2):
        with folders.turn():
            assert os.listdir(folders.write(fill)) == [READERS]
    assert held == [["weights.tmp"]] * 2
    folders.leave()
    folders.leave()
    assert not os.listdir(tmp_path)


def test_threads_of_one_process_take_turns(tmp_path):
    folders, inside, most = WeightFolders(str(tmp_path / "w")), [0], []

    def visit() -> None:
        for _ in range(20):
            with folders.turn():
                inside[0] += 1
                most.append(inside[0])
                time.sleep(0.001)
                inside[0] -= 1
            folders.leave()

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80 and max(most) == 1 and not os.listdir(tmp_path)


def test_a_folder_that_goes_before_its_lock_is_opened_is_made_again(tmp_path, monkeypatch):
    folders, made = WeightFolders(str(tmp_path / "w")), []
    makedirs = os.makedirs

    def make(path: str, **options) -> None:
        made.append(path)
        makedirs(path, **options)
        if len(made) == 1:
            os.rmdir(path)  # as `leave` of another rank does

    monkeypatch.setattr(os, "makedirs", make)
    with folders.turn():
        assert os.listdir(folders.path) == [LOCK] and len(made) == 2
    with pytest.raises(FileNotFoundError), folders.turn():
        raise FileNotFoundError  # of what is done inside


def test_a_write_that_fails_leaves_no_version(tmp_path):
    folders = WeightFolders(str(tmp_path / "w"))
    with pytest.raises(OSError, match="full"), folders.turn():
        folders.write(lambda folder: (_ for _ in ()).throw(OSError("full")))
    assert not folders.has("weights") and not folders.has("v1")
    folders.leave()
    assert not os.listdir(tmp_path)

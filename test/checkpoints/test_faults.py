"""Samples of `test/fault_runs.py` and `test/export_faults.py`, where each operation on a file fails, and of `test/fuzz_folders.py` and
`test/fuzz_readers.py`."""

import errno
import os

import pytest
from fault_layer import FaultLayer
from launch import ROOT, forked, in_fork

from trainer import entry


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize("ranks", [(), ("--ranks", "2", "--rank", "1")])
def test_a_checkpoint_is_there_after_a_fault_and_the_run_goes_on(backend, ranks):
    own = [backend, "--sample", "3", "--seed", "3", *ranks, "--kinds", "ENOSPC", "EIO", "kill"]
    code, output = forked(1, str(ROOT / "test/fault_runs.py"), *own, timeout=200)
    assert code == 0 and "3 faults" in output and "0 failures" in output, output[-6000:]


def test_a_clock_that_jumps_moves_no_checkpoint():
    own = ["fsdp2", "--sample", "3", "--kinds", "an hour back", "a day on"]
    code, output = forked(1, str(ROOT / "test/fault_runs.py"), *own, timeout=200)
    assert code == 0 and "3 faults" in output and "0 failures" in output, output[-6000:]


def test_an_export_is_whole_or_not_there():
    own = [str(ROOT / "test/export_faults.py"), "--sample", "6", "--seed", "3"]
    code, output = in_fork(*own, timeout=200)
    assert code == 0 and "24 faults" in output and "0 failures" in output, output[-6000:]


def test_random_damage_is_noticed_or_harmless():
    own = [str(ROOT / "test/fuzz_folders.py"), "--count", "32", "--seed", "5"]
    code, output = in_fork(*own, timeout=200)
    assert code == 0 and "32 cases, 0 failures" in output, output[-6000:]


def test_damaged_data_images_requests_and_answers_are_one_line():
    own = [str(ROOT / "test/fuzz_readers.py"), "--count", "40", "--seed", "2"]
    code, output = in_fork(*own, timeout=200)
    assert code == 0 and "40 cases, 0 failures" in output, output[-6000:]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_fault_of_the_disk_is_one_line(fault, monkeypatch, capsys):
    def main(_) -> None:
        raise OSError(fault, os.strerror(fault), "runs/mine/x")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(entry, "leave", leave)
    with pytest.raises(SystemExit, match="2"):
        entry.run_command(main, [])
    assert f"error: runs/mine/x: cannot be read or written: {os.strerror(fault)}." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "kill", ""])
def test_the_layer_fails_the_operation_that_it_should(kind, tmp_path):
    """In a fork, since the layer stays. The fifth operation is the second write."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == {"kill": -9, "": 0}.get(kind, getattr(errno, kind, 0))
        left = (tmp_path / "a").read_bytes()
        assert left == (b"1234" * 2 if not kind else b"123412")
        assert (tmp_path / "b").exists() == (not kind)
        return
    code = 1
    try:
        layer = FaultLayer(tmp_path, kind, 5 if kind else 0)
        layer.install()
        os.mkdir(tmp_path / "folder")
        with open(tmp_path / "a", "wb", buffering=0) as file:
            os.fsync(file)
            file.write(b"1234")
            file.write(b"1234")
        os.rename(tmp_path / "a", tmp_path / "b")
        os.rename(tmp_path / "b", tmp_path / "a")
        (tmp_path / "b").write_text("x")
        seen = [operation for operation, _ in layer.seen]
        code = 0 if seen == ["mkdir", "open", "fsync", "write", "write", "rename", "rename", "open", "write"] else 1
    except OSError as error:
        code = error.errno
    finally:
        os._exit(code)

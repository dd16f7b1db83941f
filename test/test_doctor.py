"""`python -m trainer.cli.doctor`, run in sound and in broken environments. Nothing of them is made up by the test."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, run_process

from trainer.compare.runs.launch import free_port

DOCTOR = [sys.executable, "-m", "trainer.cli.doctor"]


def lines(output: str) -> dict[str, tuple[str, str]]:
    """{name of the thing: (state, text)}"""
    found = [line for line in output.splitlines() if line.startswith(("ok ", "note ", "FAIL "))]
    return {line[6:21].strip(): (line[:5].strip(), line[21:].strip()) for line in found}


def package(folder: Path, name: str, version: str, *needs: str) -> None:
    """What pip leaves of an installed package, without its code."""
    facts = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")


@pytest.fixture
def unshared(tmp_path):
    """A prefix for commands that may mount without changing this machine. Skips where that is forbidden."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("unshare is not permitted here")
    return lambda script: ["unshare", "-m", "bash", "-ec", f"{script}\nexec {' '.join(DOCTOR)}"]


def test_a_sound_machine(tmp_path):
    folder = tmp_path / "runs"
    code, output = run_process([*DOCTOR, "--path", str(folder)], MASTER_PORT=str(free_port()))
    found = lines(output)
    assert code == 0 and output.endswith("nothing would fail\n"), output
    assert {state for state, _ in found.values()} <= {"ok", "note"}
    assert {"packages", "versions", "flash-attn", "DeepSpeed", "vLLM", "CUDA", "visible GPUs", "NCCL"} <= found.keys()
    assert {"launcher", "network", "port", "ulimit -n", "ulimit -l", "/dev/shm", "--path"} <= found.keys()
    assert folder.is_dir() and not any(folder.iterdir())


def test_everything_that_is_broken_has_its_line(tmp_path):
    package(tmp_path, "vllm", "0.33.0", "torch==2.14.0")
    package(tmp_path, "flash-attn", "2.8.3")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("import flash_attn_2_cuda\n")  # as in a wheel for another torch
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        settings = {
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "CUDA_VISIBLE_DEVICES": "0,99",
            "GLOO_SOCKET_IFNAME": "nope0",
            "WORLD_SIZE": "4",
            "DS_ACCELERATOR": "nope",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }
        command = ["bash", "-c", f"ulimit -n 256; exec {' '.join(DOCTOR)} --path {tmp_path}/file/runs"]
        code, output = run_process(command, **settings)
    found = lines(output)
    expected = {
        "packages": "vllm 0.33.0 (needs <0.33,>=0.32)",
        "versions": "vllm 0.33.0 needs torch ==2.14.0, found 2.",
        "flash-attn": "cannot be imported: No module named 'flash_attn_2_cuda'",
        "DeepSpeed": "(DS_ACCELERATOR=nope) -> unset DS_ACCELERATOR",
        "visible GPUs": "names 2 GPUs, torch sees ",
        "launcher": "WORLD_SIZE=4 without RANK",
        "network": "GLOO_SOCKET_IFNAME=nope0, and this host has only ",
        "port": "cannot be used: Address already in use -> torchrun --standalone",
        "ulimit -n": "256 open files",
        "--path": "Not a directory",
    }
    for name, text in expected.items():
        assert found[name][0] == "FAIL" and text in found[name][1], (name, found[name])
    assert {name for name, (state, _) in found.items() if state == "FAIL"} == expected.keys()
    assert code == 2 and f"error: doctor: {len(expected)} things would fail: packages, versions" in output
    assert "Traceback" not in output


def test_a_container_with_little_shared_memory_and_infiniband(unshared):
    script = "mount -t tmpfs -o size=64m tmpfs /dev/shm; mount -t tmpfs tmpfs /sys/class"
    script += "; mkdir -p /sys/class/infiniband/mlx5_0; ulimit -l 64"
    code, output = run_process(unshared(script), MASTER_PORT=str(free_port()))
    found = lines(output)
    assert code == 2 and "error: doctor: 1 thing would fail: ulimit -l" in output, output
    assert found["ulimit -l"][1].startswith("64 KiB; InfiniBand needs unlimited -> ulimit -l unlimited")
    assert found["/dev/shm"] == ("note", found["/dev/shm"][1]) and found["/dev/shm"][1].startswith("64 MiB free")


def test_a_torch_without_cuda_beside_a_driver(unshared):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is a build for CUDA")
    driver = "mount -t tmpfs tmpfs /proc/driver; mkdir /proc/driver/nvidia; touch /proc/driver/nvidia/version"
    code, output = run_process(unshared(driver), MASTER_PORT=str(free_port()))
    assert code == 2 and "error: doctor: 1 thing would fail: CUDA" in output, output
    assert "is a build for the CPU -> pip install torch from" in lines(output)["CUDA"][1]


@pytest.mark.parametrize("shared", [True, False])
def test_two_nodes(shared, tmp_path, unshared):
    """The second node has a host name of its own, and without `shared` also a folder of its own."""
    (tmp_path / "runs").mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = " ".join([*launch, "--node_rank", "1", "-m", "trainer.cli.doctor", "--path", f"{tmp_path}/runs"])
    mount = "" if shared else f"mount -t tmpfs tmpfs {tmp_path}/runs; "
    second = ["unshare", "-m", "-u", "bash", "-ec", f"hostname other; {mount}{command}"]
    interface = {"GLOO_SOCKET_IFNAME": "lo"}  # the other host name has no address
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "second.txt").open("w"))
        environment = ["env", "GLOO_SOCKET_IFNAME=lo", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
        other = subprocess.Popen([*environment, *second], stdout=log, stderr=log, start_new_session=True)
        stack.callback(other.wait, 60)
        stack.callback(other.terminate)
        first = [*launch, "--node_rank", "0", "-m", "trainer.cli.doctor", "--path", f"{tmp_path}/runs"]
        code, output = run_process(first, timeout=200, **interface)
    found = lines(output)
    log = (tmp_path / "second.txt").read_text()
    assert "all-reduce" in found, f"{output}\n--- second node\n{log}"
    assert found["all-reduce"] == ("ok", "gloo, 2 ranks") and found["launcher"] == ("ok", "2 ranks on 2 nodes"), output
    if shared:
        assert code == 0 and found["--path"][1].endswith("seen by 2 hosts"), output
    else:
        text = "is not the same folder on all nodes: other cannot see what rank 0 wrote"
        assert code and found["--path"][0] == "FAIL" and text in found["--path"][1], output
    assert not list((tmp_path / "runs").iterdir())

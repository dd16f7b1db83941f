"""Findings of `doctor` about the network between ranks and the folder of runs, and its report."""

import datetime
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from trainer.distributed.collectives import broadcast_object, check_shared_folder, gather_objects
from trainer.distributed.mesh import resolve_device
from trainer.entry import quiet_libraries
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.planning.doctor_machine import FAIL, Finding, machine_findings
from trainer.planning.doctor_packages import package_findings

NETWORK_SECONDS = 60  # NCCL's first contact takes a few seconds, also between many nodes
MIN_FREE_BYTES = 1 << 30


def network_findings() -> Iterator[Finding]:
    """Join the process group and add up one number over all ranks, as training does."""
    device = resolve_device("auto")
    backend, limit = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=NETWORK_SECONDS)
    cure = "see NCCL_DEBUG=INFO; check firewall, NCCL_SOCKET_IFNAME and MASTER_ADDR"
    try:
        dist.init_process_group("gloo", timeout=limit)
        taken = _shared_gpus(device)
        if taken is None:
            group = dist.new_group(backend=backend, timeout=limit)
            number = torch.ones(1, device=device)
            dist.all_reduce(number, group=group)
            if int(number) != dist.get_world_size():
                raise RuntimeError(f"an all-reduce of ones gives {number.item():g}")
    except (RuntimeError, ValueError, OSError) as error:
        yield Finding("all-reduce", FAIL, f"{backend}: {(str(error) or type(error).__name__).splitlines()[0]}", cure)
        return
    if taken:
        yield Finding("GPU per rank", FAIL, taken, "as many ranks as GPUs, or another GPU for each task")
    else:
        yield Finding("all-reduce", "ok", f"{backend}, {counted(dist.get_world_size(), 'rank')}")


def _shared_gpus(device) -> str | None:
    """The ranks that would compute on the same GPU, which NCCL refuses. None if each has its own (collective)."""
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else dist.get_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cards: list = [None] * dist.get_world_size()
    dist.all_gather_object(cards, (socket.gethostname(), card))
    twice = [place for place in cards if cards.count(place) > 1]
    if not twice:
        return None
    ranks = [str(rank) for rank, place in enumerate(cards) if place == twice[0]]
    return f"ranks {', '.join(ranks)} see the same GPU of {twice[0][0]}"


def folder_findings(path: str, is_launched: bool) -> Iterator[Finding]:
    """Whether checkpoints can be written in a folder, and whether each node sees what rank 0 writes there."""
    probe = os.path.join(path, ".doctor")
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    finding = _try_folder(path, probe) if is_rank_0 else None
    if is_launched:
        finding = broadcast_object(finding)
        if finding.state != FAIL:
            try:
                check_shared_folder("--path", path, os.path.basename(probe))
                seen = len({host for host, _ in gather_objects((socket.gethostname(), None))})
                finding = Finding("--path", finding.state, f"{finding.text}; seen by {counted(seen, 'host')}")
            except UserError as error:
                finding = Finding("--path", FAIL, error.found, error.allowed)
            dist.barrier()
    if is_rank_0 and os.path.exists(probe):
        os.remove(probe)
    yield finding


def _try_folder(path: str, probe: str) -> Finding:
    """Write, lock and rename a file in `path`. It stays as `probe`."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, delete=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fsync(file.fileno())
        os.replace(file.name, probe)
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding("--path", FAIL, f"{path}: {error.strerror}", "a folder that can be written, on every node")
    if free < MIN_FREE_BYTES:
        return Finding("--path", FAIL, f"{path}: {free / 2**20:.0f} MiB free", "free space for checkpoints")
    return Finding("--path", "ok", f"{path}: can be written and locked; {free / 2**30:.0f} GiB free")


def examine(path: str | None) -> None:
    """Print the findings as they come (rank 0). `path` is a folder for runs. Collective under torchrun.

    Raises:
        UserError: something would fail, on any rank.
    """
    quiet_libraries()
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    found = []

    def report(findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.append(finding)
            if is_rank_0:
                print(finding, flush=True)

    report(package_findings())
    report(machine_findings())
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    if is_launched:
        report(network_findings())
        is_launched = found[-1].state != FAIL
    if path:
        report(folder_findings(path, is_launched))
    if is_launched:
        report(_of_other_ranks(found))
    if failing := [finding.name for finding in found if finding.state == FAIL]:
        plural = "things" if len(failing) > 1 else "thing"
        raise UserError("doctor", f"{len(failing)} {plural} would fail: {', '.join(failing)}")
    if is_rank_0:
        print("nothing would fail")


def _of_other_ranks(found: list[Finding]) -> list[Finding]:
    """What fails only on other ranks (collective)."""
    own = [finding for finding in found if finding.state == FAIL]
    others = {}
    for host, failing in gather_objects((socket.gethostname(), own)):
        others |= {f: Finding(f.name, FAIL, f"on {host}: {f.text}", f.cure) for f in failing if f not in own}
    return list(others.values())

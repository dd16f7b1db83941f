"""Copies of tensors in memory that the ranks of a machine share."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.compare.machines.forked_ranks import run_ranks
from trainer.distributed.collectives import gather_objects
from trainer.distributed.node_copy import node_copy

SIZE = 3 << 20


def tensors():
    yield "large", torch.arange(SIZE, dtype=torch.bfloat16)
    yield "none", torch.zeros(0, 3)
    yield "scale", torch.tensor(2.5)
    yield "rows", torch.arange(12).view(3, 4).T  # not contiguous


def own_kilobytes(part: str) -> int:
    """Of mappings of such copies: Rss counts all of their pages here, Pss a share of each page."""
    lines, found, inside = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
            inside = "memfd:weights" in line
        elif inside and line.startswith(f"{part}:"):
            found += int(line.split()[1])
    return found


def look() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    copies = node_copy(tensors(), needed=True)
    for name, expected in tensors():
        assert copies[name].dtype == expected.dtype and torch.equal(copies[name], expected), name
    size = 2 * SIZE // 1024
    gather_objects(None)
    assert own_kilobytes("Rss") >= size
    assert own_kilobytes("Pss") <= 0.6 * size, "two ranks have the same pages"
    gather_objects(None)
    older, copies = copies, node_copy(tensors(), needed=rank == 1)
    assert bool(copies) == (rank == 1) and torch.equal(older["large"], next(tensors())[1])
    assert node_copy(tensors(), needed=False) == {}
    gather_objects(None)
    assert not [fd for fd in os.listdir("/proc/self/fd") if "memfd:weights" in target(fd)], "a file is left open"
    dist.destroy_process_group()


def target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the listing's own
        return ""


def test_ranks_of_a_machine_share_one_copy(tmp_path):
    ending = run_ranks(look, 2, tmp_path / "log", timeout=120)
    assert ending.kind == "done", (ending, (tmp_path / "log").read_text())

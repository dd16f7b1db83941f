"""A task that sees one GPU, as with `srun --gpus-per-task=1`: DeepSpeed would take the GPU with the number LOCAL_RANK."""

import os
from types import SimpleNamespace

import deepspeed as library
import pytest
import torch
import torch.distributed as dist
from deepspeed import accelerator

from trainer.distributed import collectives, mesh
from trainer.strategies import deepspeed
from trainer.strategies.on_deepspeed import autotp
from trainer.strategies.options import StrategyOptions


@pytest.fixture
def given(monkeypatch):
    """What DeepSpeed is given: LOCAL_RANK, and an accelerator. No GPU is here: the steps that would use it are left out."""
    found = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(collectives, "_local_rank", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for owner, name in ((mesh, "start_process_group"), (mesh, "seed_everything"), (autotp, "use_mesh_groups")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    monkeypatch.setattr(mesh, "build_meshes", lambda *_: mesh.Meshes({"tp": dist.ProcessGroup}, None, None, None))
    monkeypatch.setattr(dist.ProcessGroup, "get_group", lambda: None, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(accelerator, "set_accelerator", lambda kind: found.append(kind.device_name()))
    monkeypatch.setattr(library, "init_distributed", lambda **_: found.append(os.environ["LOCAL_RANK"]))
    return found


def test_deepspeed_takes_the_gpu_that_the_task_sees(given):
    strategy = deepspeed.DeepspeedStrategy(StrategyOptions())
    assert strategy.device == torch.device("cuda", 0)
    strategy.setup_distributed()
    assert given == ["0"]
    assert collectives.local_rank() == 3  # so one rank of a node builds caches, and four write


def test_deepspeed_takes_the_cpu_where_a_run_with_a_gpu_asks_for_it(given, monkeypatch):
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    deepspeed.DeepspeedStrategy(StrategyOptions(device="cpu")).setup_distributed()
    assert given == ["cpu", "3"]

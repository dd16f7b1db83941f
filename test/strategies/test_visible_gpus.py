"""A task that sees one GPU, as with `srun --gpus-per-task=1`: DeepSpeed would take the GPU with the number LOCAL_RANK."""

import os

import torch
import torch.distributed as dist

from trainer.distributed import collectives, mesh
from trainer.strategies import deepspeed
from trainer.strategies.on_deepspeed import autotp
from trainer.strategies.options import StrategyOptions


def test_deepspeed_takes_the_gpu_that_the_task_sees(monkeypatch):
    import deepspeed as library
    from deepspeed import accelerator

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(collectives, "_local_rank", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    strategy = deepspeed.DeepspeedStrategy(StrategyOptions())
    assert strategy.device == torch.device("cuda", 0)
    # no GPU is here, so the steps that would use it are left out; DeepSpeed's own notes what it would be given
    for owner, name in ((mesh, "start_process_group"), (mesh, "seed_everything"), (autotp, "use_mesh_groups")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    monkeypatch.setattr(mesh, "build_meshes", lambda *_: mesh.Meshes({"tp": dist.ProcessGroup}, None, None, None))
    monkeypatch.setattr(dist.ProcessGroup, "get_group", lambda: None, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(accelerator, "set_accelerator", lambda *_: None)
    given = []
    monkeypatch.setattr(library, "init_distributed", lambda **_: given.append(os.environ["LOCAL_RANK"]))
    strategy.setup_distributed()
    assert given == ["0"]
    assert collectives.local_rank() == 3  # so one rank of a node builds caches, and four write

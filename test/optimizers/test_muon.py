"""Muon's costly part is shared out over ranks, and changes no bit of the step."""

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.compare.machines.forked_ranks import run_ranks
from trainer.optimizers import muon

SHAPES = [(6, 10), (10, 6), (8, 8), (5, 7), (7, 5)]


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def step(place=lambda tensor: tensor) -> tuple[list[torch.Tensor], int]:
    """Two steps of five matrices. Returns them, and how many this process orthogonalized."""
    parameters = [torch.nn.Parameter(place(matrix)) for matrix in matrices(0)]
    optimizer = muon.Muon(
        [{"params": parameters, "is_matrix": True, "weight_decay": 0.1}], lr=0.02, betas=(0.9, 0.95), eps=1e-8
    )
    orthogonalized, calls = muon.orthogonalized, []
    muon.orthogonalized = lambda matrix: (calls.append(0), orthogonalized(matrix))[1]
    for seed in (1, 2):
        for parameter, gradient in zip(parameters, matrices(seed)):
            parameter.grad = place(gradient)
        optimizer.step()
    muon.orthogonalized = orthogonalized
    return [muon.whole(parameter) for parameter in parameters], len(calls)


def test_three_ranks_share_the_matrices_and_take_the_step_of_one(tmp_path):
    torch.save(step()[0], tmp_path / "one.pt")

    def run() -> None:
        dist.init_process_group("gloo")
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
        for cut, place in (("whole", lambda t: t), ("cut", lambda t: distribute_tensor(t, mesh, [Shard(0)]))):
            found, count = step(place)
            expected = torch.load(tmp_path / "one.pt")
            equal = all(torch.equal(one, other) for one, other in zip(found, expected))
            (tmp_path / f"{cut}{rank}.json").write_text(json.dumps([equal, count]))
        dist.destroy_process_group()

    ending = run_ranks(run, 3, tmp_path / "log", timeout=60)
    assert ending.kind == "done", (tmp_path / "log").read_text()[-3000:]
    for cut in ("whole", "cut"):
        found = [json.loads((tmp_path / f"{cut}{rank}.json").read_text()) for rank in range(3)]
        assert found == [[True, 4], [True, 4], [True, 2]]  # of two steps with five matrices

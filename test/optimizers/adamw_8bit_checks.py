"""Run by torchrun on 4 ranks: 8-bit AdamW takes the same steps on weights cut in every way as on whole weights.

The steps are not equal bit by bit. torch's AdamW uses other instructions for the last elements of a part than for the
middle. A different last digit can give a different code.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.distributed.sharded_tensors import whole
from trainer.entry import end_well
from trainer.optimizers.adamw import states_of
from trainer.optimizers.adamw_8bit import MOMENTS, AdamW8bit

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
CUTS = [
    ((16, 1400), line, [Shard(1)]),  # 350 columns per rank: blocks of 256 lie on two ranks
    ((5, 1400), line, [Shard(0)]),  # a rank without a row
    ((5, 300), line, [Shard(1)]),
    ((3, 8, 700), line, [Shard(0)]),  # a rank without an expert
    ((3, 8, 700), square, [Shard(2), Shard(1)]),
    ((16, 700), square, [Shard(0), Shard(1)]),
    ((16, 700), square, [Shard(1), Shard(0)]),
    ((16, 700), square, [Replicate(), Shard(1)]),
    ((16, 700), square, [Shard(0), Shard(0)]),
]


def stepped(weight: torch.Tensor, gradients: list) -> tuple[torch.Tensor, dict]:
    parameter = torch.nn.Parameter(weight)
    optimizer = AdamW8bit([{"params": [parameter], "weight_decay": 0.1, "in_8_bits": True}], **OPTIONS)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return whole(parameter), {name: whole(state) for name, state in states_of(optimizer, parameter).items()}


for shape, mesh, placements in CUTS:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    gradients = [torch.randn(shape) * torch.logspace(-4, 1, shape[-1]) for _ in range(4)]
    expected, expected_states = stepped(weight.clone(), gradients)
    parts = [distribute_tensor(tensor, mesh, placements) for tensor in (weight, *gradients)]
    found, states = stepped(parts[0], parts[1:])
    assert (found - expected).norm() <= 1e-6 * expected.norm(), (shape, placements)
    assert states.keys() == {"step", *(f"{name}_{part}" for name in MOMENTS for part in ("codes", "max"))}
    for name, state in states.items():
        other, differing = expected_states[name], (state != expected_states[name]).double().mean()
        if state.dtype == torch.uint8:
            assert differing <= 1e-3, (shape, placements, name, differing)
        else:
            torch.testing.assert_close(state, other, rtol=1e-6, atol=0)
print("8 bits agree")
end_well()

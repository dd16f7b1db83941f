"""Run the fixed tiles of --exact by Triton's interpreter: their properties, plain loops, gradients, planted faults.

    test/fake_gpu/run.sh fixed_tiles.py

Prints JSON: {check: what was found}. `faults` are the planted ones, with what the self-test finds. At the end, the self-test runs on
the fake GPU, with the kernel that a GPU takes.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before the kernel is defined

import numpy as np
import torch
import values

from trainer.exact import fixed_tiles, tile_test

CPU = torch.device("cpu")


def by_tiles(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`product` as on a GPU, also of tensors of the CPU."""
    return fixed_tiles.TileProduct.apply(left, right)


def plain_loop(left: torch.Tensor, right: torch.Tensor) -> list[list[float]]:
    """Number by number, in NumPy's fp32: K front to back, and each operation rounds once."""
    rows, columns = left[0].numpy(), right[0].mT.numpy()
    out = [[np.float32(0) for _ in columns] for _ in rows]
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            for a, b in zip(row, column, strict=True):
                out[i][j] = out[i][j] + a * b
    return [[float(number) for number in row] for row in out]


def whole_numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Values whose sums have no rounding."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(3)).float()


def without_order(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A planted fault: K is split for few rows, as libraries do."""
    cut = left.shape[2] // 2
    if left.shape[1] > 4:
        return by_tiles(left, right)
    return by_tiles(left[:, :, :cut], right[:, :cut]) + by_tiles(left[:, :, cut:], right[:, cut:])


def by_columns(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A planted fault: the same for few columns."""
    return without_order(right.mT, left.mT).mT


def with_a_neighbour(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A planted fault: a tile has the zeros of its largest row."""
    out = by_tiles(left, right)
    return torch.where(out.abs() < out.abs().amax(1, keepdim=True) * 2.0**-24, torch.zeros(()), out)


def in_tf32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A planted fault: factors of 10 bits."""
    return by_tiles(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (left, right)))


def main() -> dict:
    found = {}
    left, right = tile_test._random((1, 7, 70), CPU), tile_test._random((1, 70, 5), CPU, 1)
    found["loop"] = by_tiles(left, right)[0].tolist() == plain_loop(left, right)
    left, right = whole_numbers((2, 67, 40)), whole_numbers((2, 40, 66))
    found["whole numbers"] = torch.equal(by_tiles(left, right), left @ right)
    halves = left.bfloat16(), right.bfloat16()
    found["bf16"] = torch.equal(by_tiles(*halves), (left @ right).bfloat16())
    found["nothing"] = [list(by_tiles(left[:, :rows, :k], right[:, :k]).shape) for rows, k in ((0, 40), (3, 0))]
    inputs = [x.clone().requires_grad_() for x in (left, right)]
    weights = whole_numbers((2, 67, 66))
    grads = (torch.autograd.grad((product(*inputs) * weights).sum(), inputs) for product in (by_tiles, torch.matmul))
    found["gradients"] = all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    shape = tile_test.SHAPES[0]
    planted = (without_order, by_columns, with_a_neighbour, in_tf32)
    found["faults"] = {fault.__name__: list(tile_test.faults_of_product(shape, CPU, fault)) for fault in planted}
    tile_test.gather_objects = lambda found: [found]
    values.install()
    tile_test.test_tiles(torch.device("cuda", 0))  # ends the script at a fault
    return found


if __name__ == "__main__":
    print(json.dumps(main()))

"""--exact on a GPU: products of fixed tiles. Triton's interpreter and its compiler run where the CUDA build of torch is."""

import json
import os
from pathlib import Path

import pytest
import torch
from launch import ROOT, run_process

from trainer.errors import UserError
from trainer.exact import fixed_tiles, tile_test

KIT = ROOT / "test/fake_gpu"
ENVIRONMENT = Path(os.environ.get("FAKE_GPU_ENVIRONMENT", ROOT / "build/fake_gpu_environment"))
needs_triton = pytest.mark.skipif(
    not (ENVIRONMENT / ".installed").exists(), reason="no Triton here: test/fake_gpu/run.sh makes its environment"
)


def found_by(script: str) -> dict:
    code, output = run_process(
        ["bash", str(KIT / "run.sh"), script], timeout=200, FAKE_GPU_ENVIRONMENT=str(ENVIRONMENT)
    )
    assert code == 0, output[-3000:]
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@needs_triton
def test_tiles_have_the_bits_of_the_plain_loop_and_planted_faults_are_found():
    found = found_by("fixed_tiles.py")
    faults = found.pop("faults")
    assert found.pop("nothing") == [[2, 0, 66], [2, 3, 66]]
    assert found == dict.fromkeys(("loop", "whole numbers", "bf16", "gradients"), True)
    assert faults == {
        "without_order": ["changes with the number of rows"],
        "by_columns": ["changes with the number of columns"],
        "with_a_neighbour": ["changes with the neighbours of a row"],
        "in_tf32": ["differs from the plain loop in fp32"],
    }


@needs_triton
def test_machine_code_of_real_gpus_rounds_each_product_and_each_sum():
    found = found_by("compiled_tiles.py")
    fused = found.pop("sm_90 fp32 with fusion")
    assert fused == {"products": 0, "sums": 0, "fused": 32, "tensor cores": 0}  # what the option forbids
    assert len(found) == 6
    for counts in found.values():  # 64 x 64 numbers over 4 warps of 32 threads
        assert counts == {"products": 32, "sums": 32, "fused": 0, "tensor cores": 0}, found


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_gpu_takes_tiles_for_matrices_and_for_batches_of_them(monkeypatch):
    shapes = []

    class Tiles:
        @staticmethod
        def apply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            shapes.append((tuple(left.shape), tuple(right.shape)))
            return left.as_subclass(torch.Tensor) @ right.as_subclass(torch.Tensor)

    monkeypatch.setattr(fixed_tiles, "TileProduct", Tiles)
    left, right = (
        torch.randint(-9, 9, shape).float() for shape in ((3, 5), (5, 4))
    )  # sums of integers have one result
    on_gpu = [tensor.as_subclass(OnGpu) for tensor in (left, right)]
    assert torch.equal(fixed_tiles.product(*on_gpu), left @ right)
    assert torch.equal(fixed_tiles.linear(on_gpu[0], on_gpu[1].T), left @ right)
    assert fixed_tiles.product(*(tensor.expand(2, *tensor.shape) for tensor in on_gpu)).shape == (2, 3, 4)
    assert shapes == [((1, 3, 5), (1, 5, 4))] * 2 + [((2, 3, 5), (2, 5, 4))]
    assert torch.equal(fixed_tiles.product(left, right), left @ right) and len(shapes) == 3  # a CPU does not


def test_the_self_test_refuses_another_product(monkeypatch):
    """The sums of a CPU's library come in another order than those of the loop."""
    monkeypatch.setattr(tile_test, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"a product of .* differs from the plain loop in fp32"):
        tile_test.test_tiles(torch.device("cpu"))
    monkeypatch.setattr(tile_test, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="on a GPU without Triton"):
        tile_test.test_tiles(torch.device("cpu"))

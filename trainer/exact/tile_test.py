"""The test at the start of an --exact run on a GPU: have the kernels in use, on the device in use, the properties of fixed tiles?"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from trainer.distributed.collectives import gather_objects
from trainer.distributed.mesh import resolve_device, start_process_group
from trainer.entry import run_command
from trainer.errors import UserError
from trainer.exact.block_attention import block_attention
from trainer.exact.fixed_tiles import product

SHAPES = ((1, 37, 96, 70), (2, 130, 33, 40))  # matrices, rows, K, columns: whole tiles, parts of tiles, single rows
CUTS = (1, 2, 13)  # rows or columns before each border
INSTEAD = "Add --device cpu, or remove the flag."


def test_tiles(device: torch.device) -> None:
    """Raise UserError if a product or attention lacks a property that --exact needs (collective, about a second).

    A row must not change with the number of rows, its place, its neighbours, the columns of a rank, or its address.
    """
    if find_spec("triton") is None:
        raise UserError("--exact", "on a GPU without Triton", instead=INSTEAD)
    for shape in SHAPES:
        for fault in faults_of_product(shape, device, product):
            raise UserError("--exact", f"on this GPU, a product of {shape} {fault}", instead=INSTEAD)
    for fault in faults_of_attention(device):
        raise UserError("--exact", f"on this GPU, attention {fault}", instead=INSTEAD)
    plain = _digests(device, 0)
    others = {"from one call to the next": _digests(device, 0), "with the place in memory": _digests(device, 1)}
    others |= {f"between this rank and rank {rank}": found for rank, found in enumerate(gather_objects(plain))}
    for how, found in others.items():
        for name in plain:
            if found[name] != plain[name]:
                raise UserError("--exact", f"on this GPU, {name} changes {how}", instead=INSTEAD)


def faults_of_product(shape: tuple[int, int, int, int], device: torch.device, multiply: Callable) -> Iterator[str]:
    """What is wrong with multiply(left, right), as ends of a sentence. `shape` is (matrices, rows, K, columns)."""
    matrices, rows, inner, columns = shape
    left, right = _random((matrices, rows, inner), device), _random((matrices, inner, columns), device, seed=1)
    whole = multiply(left, right)
    loop = torch.zeros_like(whole)
    for k in range(inner):
        loop = loop + left[:, :, k, None] * right[:, k, None, :]
    if _differ(whole, loop):
        yield "differs from the plain loop in fp32"
    cuts = [*CUTS, rows - sum(CUTS)]
    if _differ(whole, torch.cat([multiply(part, right) for part in left.split(cuts, 1)], 1)):
        yield "changes with the number of rows"
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2)).to(device)
    if _differ(whole[:, order], multiply(left[:, order], right)):
        yield "changes with the place of a row"
    others = torch.full_like(left, 1e30)
    others[:, 5] = left[:, 5]
    if _differ(whole[:, 5], multiply(others, right)[:, 5]):
        yield "changes with the neighbours of a row"
    cuts = [*CUTS, columns - sum(CUTS)]
    if _differ(whole, torch.cat([multiply(left, part) for part in right.split(cuts, 2)], 2)):
        yield "changes with the number of columns"
    if _differ(whole, multiply(left.mT.contiguous().mT, right.mT.contiguous().mT)):
        yield "changes with the order in memory"
    if _differ(whole[-1:], multiply(left[-1:], right[-1:])):
        yield "changes with the number of matrices"


def faults_of_attention(device: torch.device) -> Iterator[str]:
    """A token must have the same bits alone as in its sample, and the value of the formula."""
    heads, tokens, columns = 2, 70, 16
    positions, scale = torch.arange(tokens, device=device)[None], columns**-0.5
    query = _random((1, 2 * heads, tokens, columns), device)
    key, value = (_random((1, heads, tokens, columns), device, seed) for seed in (1, 2))
    whole = block_attention(query, key, value, positions, scale)
    for at in (0, 31, 32, 69):
        seen = [states[:, :, : at + 1] for states in (key, value)]
        alone = block_attention(query[:, :, at : at + 1], *seen, positions[:, at : at + 1], scale)
        if _differ(alone, whole[:, :, at : at + 1]):
            yield "of one token has other bits than in its sample"
            break
    keys, values = (states.double().repeat_interleave(2, 1) for states in (key, value))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    formula = (query.double() @ keys.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ values
    if (whole - formula).abs().max() > 1e-5:
        yield "differs from its formula"


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a != b).any())


def _random(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _digests(device: torch.device, shift: int) -> dict[str, str]:
    """Hashes of results and gradients of row operations, whose tensors begin `shift` numbers after their memory."""

    def make(*shape: int) -> torch.Tensor:
        values = _random(shape, device)
        memory = values.new_empty(values.numel() + shift)
        return memory[shift:].view(shape).copy_(values).requires_grad_()

    rows, weight, ids = make(37, 200), make(50, 24), torch.arange(70, device=device) % 41
    norm = [make(37, 64), make(64)]
    matrices = [make(1, 37, 96), make(1, 96, 40)]
    heads = [make(1, 2, 40, 16) for _ in range(3)]
    found = {
        "a product": (product(*matrices), matrices),
        "attention": (block_attention(*heads, torch.arange(40, device=device)[None], 0.25), heads),
        "log_softmax": (rows.log_softmax(-1), [rows]),
        "an embedding": (F.embedding(ids, weight), [weight]),
        "a norm": (norm[1] * norm[0] * torch.rsqrt(norm[0].pow(2).mean(-1, keepdim=True) + 1e-6), norm),
    }
    return {name: _digest(*pair) for name, pair in found.items()}


def _digest(result: torch.Tensor, inputs: list[torch.Tensor]) -> str:
    seed = torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.device)
    tensors = [result.detach(), *torch.autograd.grad(result, inputs, seed)]
    return hashlib.sha256(b"".join(tensor.contiguous().cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def main(_argv: list[str]) -> None:
    device = resolve_device("cuda")
    start_process_group(device)
    test_tiles(device)
    print("fixed tiles: products have the bits of the plain loop, attention those of a token alone, on all ranks")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])

"""Products of --exact: torch's on a CPU, and fixed tiles on a GPU."""

import torch
import torch.nn.functional as F


class TileProduct(torch.autograd.Function):
    """left @ right of (matrices, rows, K) and (matrices, K, columns), by fixed tiles. So are both gradients."""

    @staticmethod
    def forward(ctx, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # not at the top: only CUDA builds of torch have Triton
        from trainer.exact.tile_kernel import tile_product

        ctx.save_for_backward(left, right)
        return tile_product(left, right)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        left, right = ctx.saved_tensors
        of_left = TileProduct.apply(grad, right.mT) if ctx.needs_input_grad[0] else None
        of_right = TileProduct.apply(left.mT, grad) if ctx.needs_input_grad[1] else None
        return of_left, of_right


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right of two matrices, or of two batches of matrices."""
    if not left.is_cuda:
        return left @ right
    if left.dim() == 3:
        return TileProduct.apply(left, right)
    return TileProduct.apply(left[None], right[None])[0]


def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return inputs (rows, in) times weight (out, in) transposed."""
    return product(inputs, weight.T) if inputs.is_cuda else F.linear(inputs, weight)

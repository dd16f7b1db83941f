"""A matrix product of fixed tiles for GPUs, in Triton. A number of the result depends on its row and its column alone.

Libraries choose tiles, and may split K, by the shapes and the place in memory. Here tiles are constants, and one program computes
a tile. It adds up K front to back, one product at a time, and rounds each product and each sum to fp32. So the bits are those of
the plain loop. This is slower than a library, and uses no tensor cores.
"""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 64  # of a tile
NUMBERS = ["rows", "columns", "inner", *(f"{side}_{dim}" for side in ("left", "right", "out") for dim in range(3))]


# nothing is specialized: all shapes, strides and addresses of a dtype run one binary
@triton.jit(do_not_specialize=["left", "right", "out", *NUMBERS])
def _product(
    left, right, out, rows, columns, inner,
    left_0, left_1, left_2, right_0, right_1, right_2, out_0, out_1, out_2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(2).to(tl.int64)
    left += matrix * left_0 + row * left_1
    right += matrix * right_0 + column * right_2
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(inner):  # no tl.dot: its order is the compiler's
        a = tl.load(left, mask=row < rows, other=0.0).to(tl.float32)
        b = tl.load(right, mask=column < columns, other=0.0).to(tl.float32)
        total += a[:, None] * b[None, :]
        left += left_2
        right += right_1
    place = out + matrix * out_0 + row[:, None] * out_1 + column[None, :] * out_2
    tl.store(place, total, mask=(row[:, None] < rows) & (column[None, :] < columns))


def tile_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right, (matrices, rows, columns), of tensors (matrices, rows, K) and (matrices, K, columns).

    fp32 or bf16, with any strides. Factors and sums are fp32, and the result is rounded once to the dtype.
    """
    (matrices, rows, inner), columns = left.shape, right.shape[2]
    out = left.new_empty(matrices, rows, columns, dtype=torch.float32)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), matrices)
    strides = (*left.stride(), *right.stride(), *out.stride())
    if out.numel():  # without fused multiply-adds: each operation rounds once
        sizes = (rows, columns, inner, *strides, ROWS, COLUMNS)
        _product[grid](left, right, out, *sizes, num_warps=4, enable_fp_fusion=False)
    return out.to(left.dtype)

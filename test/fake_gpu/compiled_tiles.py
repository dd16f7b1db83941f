"""Compile the kernel of fixed tiles for real GPUs, without one. Prints JSON: {GPU and dtype: what a thread's code has}.

    python compiled_tiles.py

It reads the machine code: how many products, sums, fused multiply-adds and tensor-core operations of fp32 it has. `with fusion`
is the same kernel without the option that forbids fused ones.
"""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.disasm import get_sass

from trainer.exact.tile_kernel import COLUMNS, ROWS, _product

KINDS = {"products": "FMUL", "sums": "FADD", "fused": "FFMA", "tensor cores": "[A-Z]*MMA"}


def counts(capability: int, dtype: str, fusion: bool = False) -> dict[str, int]:
    """The last digit of an operation says how many numbers it works on at once."""
    signature = dict.fromkeys(_product.arg_names, "i32")
    signature |= {
        "left": f"*{dtype}",
        "right": f"*{dtype}",
        "out": "*fp32",
        "ROWS": "constexpr",
        "COLUMNS": "constexpr",
    }
    source = ASTSource(_product, signature, {"ROWS": ROWS, "COLUMNS": COLUMNS})
    options = {"num_warps": 4, "enable_fp_fusion": fusion}
    code = get_sass(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"])
    found = {name: re.findall(rf"\b{kind}(\d?)\b", code) for name, kind in KINDS.items()}
    return {name: sum(int(digit or 1) for digit in digits) for name, digits in found.items()}


if __name__ == "__main__":
    found = {f"sm_{gpu} {dtype}": counts(gpu, dtype) for gpu in (80, 90, 100) for dtype in ("fp32", "bf16")}
    print(json.dumps(found | {"sm_90 fp32 with fusion": counts(90, "fp32", fusion=True)}))

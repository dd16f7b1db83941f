"""`--cpu_matmul`: the library that multiplies fp32 matrices on CPU, MKL or oneDNN.

torch calls MKL for fp32. MKL uses AVX-512 only on Intel's processors. torch also contains oneDNN, and calls it for bf16.
oneDNN uses AVX-512 on AMD's processors too, and is up to twice as fast there. So this file replaces torch's large fp32
products (`aten::mm`, `aten::addmm`) by products of oneDNN. Only the choice of oneDNN registers anything with torch.
"""

import os
import warnings

import torch

from trainer.distributed.processor import is_made_by
from trainer.errors import UserError

# Settings of oneDNN and of torch: the number of products whose code is kept, 1024 by default. Each one occupies some
# MiB. So lengths that never repeat would fill one or two GiB.
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CACHED = 32
SMALL = 2**22  # multiply-adds of a product; below this, oneDNN gains little, or less than its call costs
LARGE_COPY = 2**25  # elements of a factor that oneDNN must copy first; MKL needs no copy

_in_use = False
_kernels = []  # a registration with torch lasts as long as its Library object
_in_group = False  # while the products of the experts of a layer run


def choose_cpu_matmul(choice: str) -> str:
    """Choose auto, mkl or onednn for all later fp32 products of this process. Return the one in use, mkl or onednn.

    This covers layers, their gradients and the head, but not the head's gradient over chunks. Call it before any product.

    Raises:
        UserError: `choice` is onednn, and this build of torch does not contain it.
    """
    global _in_use
    for name in CACHES:  # they are read at the first product of oneDNN, which is one of bf16 without this setting
        os.environ.setdefault(name, str(CACHED))
    is_there = torch.backends.mkldnn.is_available()
    if choice == "onednn" and not is_there:
        raise UserError("--cpu_matmul", "onednn, but this build of torch does not contain it", "auto, mkl")
    is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    _in_use = choice == "onednn" or (choice == "auto" and is_there and is_avx512 and is_made_by("AuthenticAMD"))
    if _in_use and not _kernels:
        _install()
    return chosen()


def chosen() -> str:
    """The library in use for fp32 products: onednn or mkl."""
    return "onednn" if _in_use else "mkl"


def _install() -> None:
    """Put products of oneDNN in place of torch's own, once per process. They work while oneDNN is in use."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, replace in (("mm", _mm), ("mm.out", _mm_out), ("addmm", _addmm), ("addmm.out", _addmm_out)):
            plain = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, replace(plain), "CPU", with_keyset=True)
        plain = torch.library.get_kernel("aten::_grouped_mm", "CPU").call_boxed
        library.impl("_grouped_mm", _grouped_mm(plain), "CPU", with_keyset=True)
    _kernels.append(library)


def _is_ours(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether `a` b is a large fp32 product that is fast in oneDNN. torch reports errors of invalid products."""
    if _in_group or not _in_use or any(tensor.dtype is not torch.float32 for tensor in (a, b, *others)):
        return False
    if not (a.ndim == 2 == b.ndim and a.shape[1] == b.shape[0]):
        return False
    is_copied = not a.is_contiguous() and a.numel() > LARGE_COPY
    return a.numel() * b.shape[1] >= SMALL and min(b.shape) > 1 and not is_copied


def _is_bias(bias: torch.Tensor, b: torch.Tensor, beta, alpha) -> bool:
    return bias.shape == (b.shape[1],) and bias.is_contiguous() and beta == alpha == 1


def _product(a: torch.Tensor, b: torch.Tensor, bias=None) -> torch.Tensor:
    """Return a b + bias, for (rows, inner), (inner, columns) and (columns,)."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    (rows, inner), columns = a.shape, b.shape[1]
    if bias is None and a.t().is_contiguous() and columns * (inner + rows) < rows * inner:
        # the transposed product: oneDNN reads its first factor row by row, and this copies less than all of `a`
        return linear(b.t(), a, None, "none", [], "").t().contiguous()
    is_dense = b.is_contiguous() or b.t().is_contiguous()  # with gaps between rows, oneDNN has only slow code
    return linear(a, (b if is_dense else b.contiguous()).t(), bias, "none", [], "")


def _mm(plain):
    def mm(keys, a, b):
        return _product(a, b) if _is_ours(a, b) else plain(keys, a, b)

    return mm


def _mm_out(plain):
    def mm_out(keys, a, b, *, out):
        if _is_ours(a, b, out) and out.shape == (a.shape[0], b.shape[1]):
            return out.copy_(_product(a, b))
        return plain(keys, a, b, out=out)

    return mm_out


def _addmm(plain):
    def addmm(keys, bias, a, b, *, beta=1, alpha=1):
        if _is_ours(a, b, bias) and _is_bias(bias, b, beta, alpha):
            return _product(a, b, bias)
        return plain(keys, bias, a, b, beta=beta, alpha=alpha)

    return addmm


def _addmm_out(plain):
    def addmm_out(keys, bias, a, b, *, beta=1, alpha=1, out):
        is_ours = _is_ours(a, b, bias, out) and _is_bias(bias, b, beta, alpha)
        if is_ours and out.shape == (a.shape[0], b.shape[1]):
            return out.copy_(_product(a, b, bias))
        return plain(keys, bias, a, b, beta=beta, alpha=alpha, out=out)

    return addmm_out


def _grouped_mm(plain):
    """Leave experts to MKL. Their numbers of tokens never repeat, and oneDNN makes code anew for each number."""

    def grouped_mm(keys, *args, **kwargs):
        global _in_group
        _in_group = True
        try:
            return plain(keys, *args, **kwargs)
        finally:
            _in_group = False

    return grouped_mm

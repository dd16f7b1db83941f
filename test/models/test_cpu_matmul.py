"""oneDNN's products instead of MKL's: against fp64, for every layout of a matrix, never by oneDNN's slow code.

Runs of test_parity.py compare a training run with oneDNN to the plain loop, which calls MKL.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launch import run_process

from trainer.models import cpu_matmul
from trainer.models.cpu_matmul import SMALL, choose_cpu_matmul

ROWS, INNER, COLUMNS = 190, 230, 170
LAYOUTS = {
    "whole": lambda rows, columns: torch.randn(rows, columns),
    "transposed": lambda rows, columns: torch.randn(columns, rows).t(),
    "columns of a wider one": lambda rows, columns: torch.randn(rows, columns + 9)[:, 4 : columns + 4],
    "columns of a transposed one": lambda rows, columns: torch.randn(columns, rows + 9)[:, 4 : rows + 4].t(),
    "every second column": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
    "one row repeated": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "one column repeated": lambda rows, columns: torch.randn(rows, 1).expand(rows, columns),
    "one number repeated": lambda rows, columns: torch.randn(()).expand(rows, columns),
}


@pytest.fixture(autouse=True)
def onednn():
    torch.manual_seed(0)
    choose_cpu_matmul("onednn")
    yield
    choose_cpu_matmul("mkl")


def calls_of_onednn(capfd, function) -> list[str]:
    """Return oneDNN's log lines, one for each product."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        function()
    return [line for line in capfd.readouterr().out.splitlines() if ",exec," in line and "inner_product" in line]


def assert_within_rounding(found: torch.Tensor, a, b, bias) -> None:
    """In any order, a sum of n products is at most n u (|a| |b|) away. u is half an ulp of 1.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 3.5."""
    exact = a.double() @ b.double() + bias.double()
    bound = (INNER + 1) * 2**-24 * (a.double().abs() @ b.double().abs() + bias.double().abs())
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("columns", [COLUMNS, 25])  # with fewer columns, transposed factors take another path
def test_products_of_every_layout(layout_a, layout_b, columns, capfd):
    rows = ROWS if columns == COLUMNS else 1000
    a, b = LAYOUTS[layout_a](rows, INNER), LAYOUTS[layout_b](INNER, columns)
    bias, results = torch.randn(columns), []
    outs = [torch.full((columns, rows), 7.0).t() for _ in range(2)]

    def products():
        results.extend([a @ b, torch.addmm(bias, a, b)])
        results.extend([torch.mm(a, b, out=outs[0]), torch.addmm(bias, a, b, out=outs[1])])

    calls = calls_of_onednn(capfd, products)
    assert len(calls) == 4 and not any("ref:any" in call for call in calls), calls
    assert_within_rounding(results[0], a, b, torch.zeros(()))
    assert_within_rounding(results[1], a, b, bias)
    for result, out, plain in zip(results[2:], outs, results):
        assert result is out and out.t().is_contiguous() and torch.equal(out, plain)


@pytest.mark.parametrize("rows, inner, columns", [(1, 2048, 4096), (100_000, 2, 50), (70, 70_000, 2), (3, 1025, 2049)])
def test_narrow_products(rows, inner, columns, capfd):
    a, b, bias = torch.randn(rows, inner), torch.randn(inner, columns + 3)[:, :columns], torch.randn(columns)
    results = []
    calls = calls_of_onednn(capfd, lambda: results.extend([a @ b, torch.addmm(bias, a, b), a.t().contiguous().t() @ b]))
    assert len(calls) == 3 and not any("ref:any" in call for call in calls), calls
    for found, added in zip(results, (torch.zeros(()), bias, torch.zeros(()))):
        exact = a.double() @ b.double() + added.double()
        assert (found.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_a_layer(with_bias, capfd):
    hidden, upstream = torch.randn(4, 100, 64), torch.randn(4, 100, 192)
    layer = torch.nn.Linear(64, 192, bias=with_bias)

    def gradients(dtype):
        x, weight = (t.detach().to(dtype).requires_grad_() for t in (hidden, layer.weight))
        bias = layer.bias.detach().to(dtype) if with_bias else None
        y = F.linear(x, weight, bias)
        y.backward(upstream.to(dtype))
        return [y.detach(), x.grad, weight.grad]

    found = []
    calls = calls_of_onednn(capfd, lambda: found.extend(gradients(torch.float32)))
    assert len(calls) == 3
    for tensor, exact in zip(found, gradients(torch.float64)):
        assert (tensor.double() - exact).norm() <= 1e-6 * exact.norm()


def test_others_stay_torchs_own(capfd):
    a, b, bias = torch.randn(SMALL // 64 // 64, 64), torch.randn(64, 64), torch.randn(128)
    plain = [
        lambda: a[1:] @ b,  # small
        lambda: a.double() @ b.double(),
        lambda: torch.addmm(a[:, :64], a, b, beta=0.5),
        lambda: torch.addmm(bias[:1], a, b),
        lambda: torch.addmm(bias[::2], a, b),
        lambda: torch.addmm(bias[:1].expand(64), a, b, out=torch.empty(len(a), 64)),
        lambda: torch.mm(a, b, out=torch.empty(0)),
        lambda: torch.cat([b, b], 1).view(1, -1).t() @ torch.randn(1, 3000)[:, ::2],  # an inner dimension of 1
    ]
    for product in plain:
        results = []
        torch.manual_seed(1)
        assert not calls_of_onednn(capfd, lambda product=product, results=results: results.append(product()))
        choose_cpu_matmul("mkl")
        torch.manual_seed(1)
        assert torch.equal(results[0], product())
        choose_cpu_matmul("onednn")
    assert len(calls_of_onednn(capfd, lambda: a @ b)) == 1
    choose_cpu_matmul("mkl")
    assert not calls_of_onednn(capfd, lambda: a @ b)


def test_a_factor_too_large_to_copy_stays_torchs_own(capfd, monkeypatch):
    a, b = torch.randn(300, 400), torch.randn(300, 200)
    monkeypatch.setattr(cpu_matmul, "LARGE_COPY", a.numel())
    assert len(calls_of_onednn(capfd, lambda: a.t() @ b)) == 1
    monkeypatch.setattr(cpu_matmul, "LARGE_COPY", a.numel() - 1)
    assert not calls_of_onednn(capfd, lambda: a.t() @ b)
    assert len(calls_of_onednn(capfd, lambda: a.t().contiguous() @ b)) == 1


def test_grouped_products_of_experts_stay_torchs_own(capfd):
    """Forward and backward: each expert has another number of rows, and oneDNN would make code for each number."""
    ends = torch.tensor([150, 190, 400], dtype=torch.int32)
    rows = torch.randn(400, 232, requires_grad=True)
    experts = torch.randn(3, 256, 232, requires_grad=True)

    def train():
        F.grouped_mm(rows, experts.transpose(1, 2), offs=ends).square().sum().backward()

    assert not calls_of_onednn(capfd, train)
    assert len(calls_of_onednn(capfd, lambda: rows.detach() @ experts[0].detach().t())) == 1


@pytest.mark.parametrize("is_amd", [False, True])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_auto(is_amd, capability, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "is_made_by", lambda vendor: is_amd)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert choose_cpu_matmul("auto") == ("onednn" if is_amd and capability == "AVX512" else "mkl")


MEMORY = """
import os, sys, torch
from trainer.models.cpu_matmul import _kernels, choose_cpu_matmul

for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.pop(name, None)  # of the process that runs the tests
choose_cpu_matmul(sys.argv[1])
dtype = getattr(torch, sys.argv[2])
sizes = [(256, 256), (256, 768), (768, 256)]
layers = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False, dtype=dtype) for size in sizes))
hidden = torch.randn(1500, 256, dtype=dtype)

def resident() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

layers(hidden).sum().backward()
before = resident()
for number in range(120):
    layers(hidden[: 300 + 37 * number % 1200]).sum().backward()
print("registered", len(_kernels), "grown", resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read on Linux only")
@pytest.mark.parametrize("choice, dtype", [("onednn", "float32"), ("mkl", "bfloat16")])
def test_lengths_that_never_repeat_do_not_fill_memory(choice, dtype):
    """By default, oneDNN keeps the code of 1024 products. With mkl, torch's own products are left in place."""
    code, output = run_process([sys.executable, "-c", MEMORY, choice, dtype])
    assert code == 0, output[-2000:]
    registered, grown = map(int, output.split("registered")[-1].split("grown"))
    assert registered == (choice == "onednn") and grown < 250


def test_errors_are_torchs_own():
    a, b = torch.randn(500, 100), torch.randn(101, 500)
    for wrong in (lambda: torch.mm(a, b), lambda: torch.mm(a[None], b), lambda: torch.addmm(torch.ones(3), a, a.t())):
        messages = []
        for choice in ("mkl", "onednn"):
            choose_cpu_matmul(choice)
            with pytest.raises(RuntimeError) as error:
                wrong()
            messages.append(str(error.value))
        assert messages[0] == messages[1]

"""oneDNN's products in the place of MKL's: against fp64, at every layout that a matrix can have, never by oneDNN's slow code.

That a training run with them equals the plain loop, which calls MKL, is among the runs of test_parity.py.
"""

import pytest
import torch
import torch.nn.functional as F

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
    """What oneDNN tells of its work, a line for each product."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        function()
    return [line for line in capfd.readouterr().out.splitlines() if ",exec," in line and "inner_product" in line]


def assert_within_rounding(found: torch.Tensor, a, b, bias) -> None:
    """Higham, Accuracy and Stability of Numerical Algorithms, 3.5: whatever the order, a sum of n products is at most
    n u (|a| |b|) away, u being half an ulp of 1."""
    exact = a.double() @ b.double() + bias.double()
    bound = (INNER + 1) * 2**-24 * (a.double().abs() @ b.double().abs() + bias.double().abs())
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("columns", [COLUMNS, 25])  # fewer columns: transposed factors go another way
def test_products_of_every_layout(layout_a, layout_b, columns, capfd):
    rows = ROWS if columns == COLUMNS else 1000
    a, b = LAYOUTS[layout_a](rows, INNER), LAYOUTS[layout_b](INNER, columns)
    bias, out = torch.randn(columns), torch.full((columns, rows), 7.0).t()
    results = []
    calls = calls_of_onednn(capfd, lambda: results.extend([a @ b, torch.addmm(bias, a, b), torch.mm(a, b, out=out)]))
    assert len(calls) == 3 and not any("ref:any" in call for call in calls), calls
    assert_within_rounding(results[0], a, b, torch.zeros(()))
    assert_within_rounding(results[1], a, b, bias)
    assert results[2] is out and not out.is_contiguous()
    assert torch.equal(out, results[0])


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
    a, b = torch.randn(SMALL // 64 // 64, 64), torch.randn(64, 64)
    plain = [lambda: a[1:] @ b, lambda: a.double() @ b.double(), lambda: torch.addmm(a[:, :64], a, b, beta=0.5)]
    plain += [lambda: torch.addmm(torch.ones(1), a, b), lambda: torch.mm(a, b, out=torch.empty(0))]
    for product in plain:
        results = []
        assert not calls_of_onednn(capfd, lambda product=product, results=results: results.append(product()))
        choose_cpu_matmul("mkl")
        assert torch.equal(results[0], product())
        choose_cpu_matmul("onednn")
    assert len(calls_of_onednn(capfd, lambda: a @ b)) == 1
    choose_cpu_matmul("mkl")
    assert not calls_of_onednn(capfd, lambda: a @ b)


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

"""--fp8 against its formulas, and a run with it: the names of weights stay, and its losses follow those of bf16.

Float8 is emulated here. The tests do not show that a GPU's kernels round in the same way.
"""

import copy
import functools
import importlib.machinery
import sys

import pytest
import torch
from launch import APART, ROOT, read_steps, torchrun, train_many
from tiny_models import make_model
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.models.layers.float8 import use_float8
from trainer.models.lora import default_targets

CPU = torch.device("cpu")
PATH = [str(APART), *sys.path]
pytestmark = pytest.mark.skipif(
    not importlib.machinery.PathFinder.find_spec("torchao", PATH), reason="torchao is not installed"
)


@pytest.fixture(autouse=True)
def find_torchao(monkeypatch):
    monkeypatch.setattr(sys, "path", PATH)


def rounded(tensor: torch.Tensor, dtype: torch.dtype, axis: int | None = None, powers: bool = False) -> torch.Tensor:
    """The values that a tensor has in float8, with one scale for all, or one for each line along `axis`."""
    largest = tensor.abs().amax() if axis is None else tensor.abs().amax(axis, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double().clamp(min=1e-12)
    scale = (torch.exp2(scale.log2().floor()) if powers else scale).float()
    return (tensor * scale).to(dtype).float() / scale


def tensorwise(inputs, weight, gradient):
    """(output, gradient of the inputs, gradient of the weight): gradients have less precision and a larger range."""
    inputs, weight = rounded(inputs, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
    gradient = rounded(gradient, torch.float8_e5m2)
    return inputs @ weight.T, gradient @ weight, gradient.T @ inputs


def rowwise(inputs, weight, gradient):
    """Each operand is scaled along the axis that its product sums over. Scales are powers of two."""

    def line(tensor, axis):
        return rounded(tensor, torch.float8_e4m3fn, axis, powers=True)

    return (
        line(inputs, 1) @ line(weight, 1).T,
        line(gradient, 1) @ line(weight, 0),
        line(gradient, 0).T @ line(inputs, 0),
    )


@pytest.mark.parametrize("recipe, formula", [("tensorwise", tensorwise), ("rowwise", rowwise)])
def test_products_are_those_of_the_formula(recipe, formula):
    model = make_model("qwen3")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)))
    layer.in_features, layer.out_features = 32, 48
    use_float8(model, recipe, CPU)
    layer = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(24, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    gradient = 1e-3 * torch.randn(24, 48, generator=torch.Generator().manual_seed(3))
    output = layer(inputs)
    output.backward(gradient)
    found = output.detach(), inputs.grad, layer.weight.grad
    plain = linear(inputs, layer.weight).detach(), gradient @ layer.weight.detach(), gradient.T @ inputs.detach()
    for one, expected, unrounded in zip(found, formula(inputs.detach(), layer.weight.detach(), gradient), plain):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        assert (one - unrounded).norm() > 1e-3 * unrounded.norm(), "nothing is rounded"


def test_only_linear_layers_of_decoder_layers_change_and_no_name_does():
    model = make_model("qwen3")
    model.model.layers[1].mlp.gate = torch.nn.Linear(32, 16)  # a router
    model.model.layers[1].odd = torch.nn.Linear(32, 24)
    names, plain = list(model.state_dict()), copy.deepcopy(model)
    use_float8(model, "rowwise", CPU)
    changed = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    linears = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears - changed == {"lm_head", "model.layers.1.mlp.gate", "model.layers.1.odd"}
    assert list(model.state_dict()) == names


def test_adapters_find_the_same_layers():
    model = make_model("qwen3")
    plain = default_targets(model)
    use_float8(model, "rowwise", CPU)
    assert default_targets(model) == plain


def test_a_gpu_without_float8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(UserError, match="--fp8: rowwise on NVIDIA A100, which has no float8"):
        use_float8(make_model("qwen3"), "rowwise", torch.device("cuda"))


def test_a_model_without_a_fitting_layer_is_refused():
    model = make_model("qwen3")
    model._no_split_modules = []
    with pytest.raises(UserError, match="--fp8: rowwise, but no linear layer of Qwen3ForCausalLM fits"):
        use_float8(model, "rowwise", CPU)


def test_runs_follow_bf16_on_one_and_two_ranks_and_the_model_loads(tmp_path):
    make_demo(str(tmp_path / "demo"))
    common = ["--pretrain", f"{tmp_path}/demo/model", "--dataset", f"{tmp_path}/demo/sft.jsonl", "--max_len", "128"]
    common += [
        "--train_batch_size",
        "16",
        "--micro_train_batch_size",
        "8",
        "--max_steps",
        "12",
        "--learning_rate",
        "1e-3",
    ]
    common += ["--param_dtype", "bf16", "--backend", "fsdp2", "--output_dir"]
    names = {
        "plain": [],
        "tensorwise": ["--fp8", "tensorwise"],
        "rowwise": ["--fp8", "rowwise", "--gradient_checkpointing"],
        "plain_adapter": ["--lora_rank", "8"],
        "adapter": ["--lora_rank", "8", "--fp8", "rowwise"],
    }
    lines = [["train_sft", *common, f"{tmp_path}/{name}", *flags] for name, flags in names.items()]
    train_many(2, lines, tmp_path, timeout=300, launch=functools.partial(torchrun, PYTHONPATH=f"{ROOT}:{PATH[0]}"))
    found = {name: [row["loss"] for row in read_steps(tmp_path / name)] for name in names}
    for recipe, plain, end in (
        ("tensorwise", "plain", 0.9),
        ("rowwise", "plain", 0.9),
        ("adapter", "plain_adapter", 0.99),
    ):
        assert found[recipe] != found[plain] and found[recipe] == pytest.approx(found[plain], rel=2e-2)
        assert found[recipe][-1] < end * found[recipe][0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "rowwise/model")

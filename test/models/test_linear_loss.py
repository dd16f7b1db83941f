"""The chunked loss of hidden states and head against logits and cross-entropy: values, gradients and memory."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, run_process
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from trainer.datasets.batches.packing import IGNORE
from trainer.models.losses import linear_loss, token_losses
from trainer.models.losses.linear_loss import linear_nll, token_nll

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "num_attention_heads": 4}


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_cross_entropy(chunk_rows, with_bias):
    generator = torch.Generator().manual_seed(chunk_rows)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((40, 16), (97, 16), (97,)))
    targets = torch.randint(0, 97, (40,), generator=generator)
    upstream = torch.rand(40, generator=generator)  # a weight per token, like advantages

    def run(function, dtype):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight, bias)[: 2 + with_bias]]
        losses = function(*leaves, *([] if with_bias else [None]))
        (losses * upstream.to(losses.dtype)).sum().backward()
        return [losses.detach(), *(leaf.grad for leaf in leaves)]

    exact = run(lambda h, w, b: F.cross_entropy(F.linear(h, w, b), targets, reduction="none"), torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        found = run(lambda h, w, b: linear_nll(h, w, b, targets, chunk_rows), dtype)
        assert found[0].dtype == torch.float32
        for tensor, expected in zip(found, exact):
            assert (tensor.double() - expected).norm() <= tolerance * expected.norm()


def test_bf16_weight_gradients_do_not_lose_digits_over_chunks():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((512, 16), (97, 16)))
    targets = torch.randint(0, 97, (512,), generator=generator)
    grads = []
    for chunk_rows in (512, 2):
        leaf = weight.clone().requires_grad_()
        linear_nll(hidden, leaf, None, targets, chunk_rows).sum().backward()
        grads.append(leaf.grad.double())
    assert (grads[0] - grads[1]).norm() <= 4e-3 * grads[0].norm()  # bf16 holds 8 bits: half a unit is 2e-3


class NoteShapes(TorchDispatchMode):
    """Note the shapes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((40, 16), (97, 16), (97,)))
    targets = torch.randint(0, 97, (40,), generator=generator)
    grads, shapes = [], []
    for trained in (True, False):
        leaves = [hidden.clone().requires_grad_(), *(t.clone().requires_grad_(trained) for t in (weight, bias))]
        losses = linear_nll(*leaves, targets, 7)
        with NoteShapes() as noted:
            losses.sum().backward()
        shapes.append(noted.shapes)
        grads.append([leaf.grad for leaf in leaves])
    assert (97, 16) in shapes[0] and not {(97, 16), (97,)} & shapes[1]
    assert torch.equal(grads[0][0], grads[1][0]) and grads[1][1:] == [None, None]
    head = weight.clone().requires_grad_()
    linear_nll(hidden, head, bias, targets, 7).sum().backward()  # hidden states that need no gradient
    assert torch.equal(head.grad, grads[0][1])


def loss_of(model, labels, monkeypatch):
    """Return the loss, and whether `linear_loss` computed it from hidden states and head."""
    asked = []

    def noted(*args):
        values, are_losses = token_nll(*args)
        asked.append(are_losses)
        return values, are_losses

    monkeypatch.setattr(token_losses, "token_nll", noted)
    positions = torch.arange(20).repeat(2, 1)
    batch = {"input_ids": torch.arange(40).view(2, 20) % 97, "position_ids": positions, "labels": labels}
    return -token_losses.label_log_probs(model, batch).sum(), any(asked)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_gives_the_same_loss_and_gradients_by_chunks(tied, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    labels = torch.randint(0, 97, (2, 20))
    labels[0, :7] = IGNORE
    plain, are_losses = loss_of(model, labels, monkeypatch)
    assert not are_losses  # so few logits take the plain path
    plain.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(token_losses, "CHUNK_BYTES", 5 * 97 * 4)
    views = []
    model.register_forward_hook(lambda _module, _inputs, output: views.append(output.logits._is_view()))
    chunked, are_losses = loss_of(model, labels, monkeypatch)
    assert are_losses and views == [False]  # FSDP2 warns of a model that returns a view
    chunked.backward()
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert "forward" not in vars(model.lm_head)


def test_a_model_that_changes_its_logits_keeps_the_plain_path(monkeypatch):
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8))
    assert model.config.final_logit_softcapping
    monkeypatch.setattr(token_losses, "CHUNK_BYTES", 5 * 97 * 4)
    assert not loss_of(model, torch.randint(0, 97, (2, 20)), monkeypatch)[1]


def test_peak_memory_is_an_eighth_of_the_logits():
    """8192 tokens x 20k words: 625 MiB of fp32 logits. In its own process, nothing else has raised the peak."""
    script = [sys.executable, str(ROOT / "scripts/bench/loss_memory.py"), "--vocab", "20000", "--chunk_bytes"]
    # freed blocks leave the process at once: otherwise the C library keeps some, and their number varies
    code, output = run_process([*script, str(2**24)], MALLOC_MMAP_THRESHOLD_="1000000")
    assert code == 0, output[-2000:]
    grown, logits = (float(re.search(f"{before}([0-9]+) MiB", output)[1]) for before in ("words: ", "of "))
    assert logits == 625 and 16 <= grown <= logits / 8, output  # a chunk itself is 16 MiB


def test_the_weight_gradient_on_a_gpu_is_summed_in_fp32_in_one_call(monkeypatch):
    """A kernel for CPU stands in, with the checks of aten/src/ATen/native/cuda/Blas.cpp, _addmm_dtype_out_cuda."""
    calls = []

    def addmm(total, one, other, out_dtype, *, beta=1, alpha=1, out):
        assert one.dim() == other.dim() == 2 and one.shape[1] == other.shape[0]
        assert one.dtype == other.dtype == torch.bfloat16 and out_dtype == out.dtype == total.dtype == torch.float32
        assert (beta, alpha) == (1, 1) and total.shape == (len(one), other.shape[1])
        calls.append(len(other))
        return out.copy_(total + one.float() @ other.float())

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(linear_loss, "on_gpu", lambda tensor: True)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((50, 16), (97, 16)))
    targets = torch.randint(0, 97, (50,), generator=generator)
    leaf, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
    linear_nll(hidden, leaf, None, targets, 20).sum().backward()
    F.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum").backward()
    library._destroy()
    assert calls == [20, 20, 10]
    assert (leaf.grad.double() - exact.grad).norm() <= 1e-2 * exact.grad.norm()


def test_chunks_are_larger_on_a_gpu():
    rows = [token_losses.tokens_of_a_chunk(151_936, torch.device(device)) for device in ("cpu", "cuda")]
    assert rows == [220, 1766]

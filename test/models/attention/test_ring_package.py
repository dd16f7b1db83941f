"""`--ring_attn_kernel ring_flash_attn`: the package's own code on CPU against ours, and what is refused."""

import importlib.util
import os

import pytest
import torch
from launch import ROOT, torchrun
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config

from trainer.errors import UserError
from trainer.models.attention import flash
from trainer.models.attention.flash import validate_ring_package
from trainer.models.attention.ring_package import validate_model

SHIM = str(ROOT / "test/flash_attn_shim")
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("ring_flash_attn") is None, reason="ring-flash-attn is not installed"
)


@needs_package
@pytest.mark.parametrize(("num_ranks", "num_checks"), [(2, 4), (3, 3)])
def test_the_package_gives_what_our_ring_and_plain_attention_give(num_ranks, num_checks):
    path = os.pathsep.join([str(ROOT), SHIM, *filter(None, [os.environ.get("PYTHONPATH")])])
    script = str(ROOT / "test/models/attention/package_checks.py")
    code, output = torchrun(num_ranks, script, timeout=300, PYTHONPATH=path)
    assert code == 0, output[-6000:]
    assert output.count("ok ") == num_checks, output
    print(output)


@pytest.mark.parametrize(
    "config, found",
    [
        (MistralConfig(sliding_window=7), "a sliding window"),
        (Gemma2Config(), "a sliding window"),
        (Gemma2Config(layer_types=["full_attention"] * 26), "a soft cap"),
        (GptOssConfig(layer_types=["full_attention"] * 36), "attention sinks"),
        (LlamaConfig(hidden_size=80, num_attention_heads=4), "head_dim 20"),
        (LlamaConfig(hidden_size=1024, num_attention_heads=2), "head_dim 512"),
    ],
)
def test_models_that_the_package_cannot_serve(config, found):
    with pytest.raises(UserError, match=f"--ring_attn_kernel: ring_flash_attn with {found}.*allowed: native"):
        validate_model(config)


def test_models_that_the_package_can_serve():
    validate_model(LlamaConfig())
    validate_model(Qwen3Config(sliding_window=4096, use_sliding_window=False))


@needs_package
def test_machines_that_cannot_run_the_package(monkeypatch):
    flash.flash_fault.cache_clear()
    with pytest.raises(UserError, match=r"needs flash-attn: pip install -e '.\[ring\]'; flash-attn 2 is not installed"):
        validate_ring_package(torch.device("cuda"))
    monkeypatch.setattr("trainer.models.attention.flash.flash_fault", lambda version: None)
    with pytest.raises(UserError, match="without a CUDA device"):
        validate_ring_package(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(UserError, match=r"compute capability 7\.5"):
        validate_ring_package(torch.device("cuda"))


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="ring_flash_attn is not installed: pip install"):
        validate_ring_package(torch.device("cuda"))

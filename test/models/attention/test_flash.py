"""Which flash kernels are used and refused, where only a part of them is installed. Tensors on CUDA are fake ones."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GptOssConfig, LlamaConfig

from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rules import refuse
from trainer.models.attention import flash
from trainer.models.attention.choice import resolve_attention, validate_flash_model
from trainer.models.attention.kernels import block_backward, block_forward


class Reached(Exception):
    """A call has come to the kernel that the message names."""


class StopAtKernel(TorchDispatchMode):
    """Raises Reached at the first attention kernel. The schema of its arguments is checked before."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.overloadpacket.__name__:
            raise Reached(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """What a process finds out once, anew in each test. Fake tensors need the capability of a GPU that is not there."""
    flash.flash_fault.cache_clear()
    flash._is_new_enough.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    yield
    flash.flash_fault.cache_clear()
    flash._is_new_enough.cache_clear()


@pytest.fixture
def only_flash_attn_4(tmp_path, monkeypatch):
    """flash-attn-4 as pip installs it: a folder flash_attn without an __init__, in which there is only `cute`."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").write_text("")
    facts = tmp_path / "flash_attn_4-4.0.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def kernels_of_a_block(head_dim: int, dtype=torch.bfloat16) -> list[str]:
    """The kernels of ring attention on one block, forward and backward, for fake CUDA tensors."""
    found = []
    with FakeTensorMode():
        query = torch.empty(1, 4, 32, head_dim, device="cuda", dtype=dtype)
        key = torch.empty(1, 2, 32, head_dim, device="cuda", dtype=dtype)
        lse = torch.empty(1, 4, 32, device="cuda")
        forward = (query, key, key, 0.1, True, None)
        backward = (query, query, key, key, query, lse, 0.1, True, None)
        for block, inputs in ((block_forward, forward), (block_backward, backward)):
            with pytest.raises(Reached) as reached, StopAtKernel():
                block(*inputs)
            found.append(str(reached.value))
    return found


FLASH = ["_flash_attention_forward", "_flash_attention_backward"]
EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]


def test_ring_attention_uses_torch_where_only_flash_attn_4_is_installed(only_flash_attn_4):
    assert kernels_of_a_block(64) == FLASH


@pytest.mark.parametrize("head_dim,dtype", [(512, torch.bfloat16), (20, torch.bfloat16), (64, torch.float32)])
def test_blocks_that_no_flash_kernel_can_serve(head_dim, dtype):
    assert kernels_of_a_block(head_dim, dtype) == EFFICIENT


def test_an_old_gpu_has_no_flash_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert kernels_of_a_block(64) == EFFICIENT
    with pytest.raises(UserError, match=r"compute capability 7\.5; it needs 8\.0"):
        flash.validate_capability("flash_attention_2", (7, 5))
    with pytest.raises(UserError, match=r"flash_attention_3 on a GPU of compute capability 10\.0; it ends at 9\.0"):
        flash.validate_capability("flash_attention_3", (10, 0))


def test_flash_attn_4_is_not_flash_attn_2(only_flash_attn_4):
    with pytest.raises(UserError, match=r"\[flash\]'; flash-attn 2 is not installed, only flash-attn-4"):
        resolve_attention("flash_attention_2", packed=False)
    with pytest.raises(UserError, match=r"hopper; flash-attn 3 is not installed, only flash-attn-4"):
        resolve_attention("flash_attention_3", packed=False)


def test_a_broken_flash_attn_is_told(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c105Error')")
    facts = tmp_path / "flash_attn-2.8.3.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="cannot be imported: undefined symbol"):
        resolve_attention("flash_attention_2", packed=True)


def test_fp32_and_wide_heads_are_refused():
    for kernel in ({"attn_implementation": "flash_attention_2"}, {"ring_attn_kernel": "ring_flash_attn"}):
        flags = from_flat(SFTArguments, {**kernel, "ring_attn_size": 2, "param_dtype": "fp32"})
        with pytest.raises(
            UserError, match=r"flash_att\w+ with --param_dtype fp32: its kernels are for half precision"
        ):
            refuse("train_sft", flags)
    flash.validate_head_dims(Gemma2Config(head_dim=256))
    with pytest.raises(UserError, match="head_dim 512 of llama; it ends at 256"):
        flash.validate_head_dims(LlamaConfig(hidden_size=1024, num_attention_heads=2))


def test_models_that_transformers_would_give_another_kernel():
    """For gpt-oss, transformers would load a kernel from the hub in place of the one that was asked for."""
    for config, name in ((GptOssConfig(), "flash_attention_2"), (BloomConfig(), "flash_attention_3")):
        with pytest.raises(UserError, match=f"{name}, which {config.model_type} does not have in transformers"):
            validate_flash_model(config, AutoModelForCausalLM, name)
    validate_flash_model(LlamaConfig(), AutoModelForCausalLM, "flash_attention_3")


def test_the_ring_does_not_use_flash_attn_3():
    flags = {"attn_implementation": "flash_attention_3", "packing_samples": True, "ring_attn_size": 2}
    with pytest.raises(UserError, match="--attn_implementation flash_attention_3 with --ring_attn_size 2"):
        refuse("train_sft", from_flat(SFTArguments, flags))

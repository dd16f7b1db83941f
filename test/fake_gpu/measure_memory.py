"""Measure memory on the fake GPU, and print it as JSON: pairs of the bytes that are needed and those that were taken.

    test/fake_gpu/run.sh measure_memory.py

Sizes are just above a power of two, where torch's own pinned memory takes twice as much.
"""

import copy
import ctypes
import gc
import json

import torch
import values
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.checkpoints import run_state
from trainer.checkpoints.shards import whole_shard
from trainer.distributed.host_offload import keep_on_host
from trainer.models.layers.activation_offload import HostCopies, offload_layer_inputs
from trainer.models.layers.activations import recompute_layers

CARD = torch.device("cuda", 0)
WIDTH = 160  # a square of it has 100 KiB in fp32, and torch's pinned memory for that 128


def pinned():
    gc.collect()
    count = ctypes.CDLL(None).fake_cuda_pinned
    count.restype = ctypes.c_size_t
    return count()


def model_of(layers=6):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=640, use_cache=False))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def torchs_own():
    tensor = torch.empty(WIDTH, WIDTH).pin_memory()
    return bytes_of([tensor]), pinned()


def staging_of_saves():
    """Two saves in the background. The second one finds the memory of the first."""
    before, found = pinned(), []
    for step in range(2):
        tensors = [torch.rand(WIDTH, WIDTH * (1 + number % 3), device=CARD) for number in range(9)]
        staged = run_state._staged([whole_shard(str(n), tensor, True) for n, tensor in enumerate(tensors)], CARD)
        host = [shard.tensor for shard in staged]
        assert all(tensor.is_pinned() and tensor.equal(own.cpu()) for tensor, own in zip(host, tensors)), step
        found.append((bytes_of(host), pinned() - before))
        del staged, host
    return found


def frozen_model():
    before, model = pinned(), model_of().to(CARD)
    expected = copy.deepcopy(model).cpu().state_dict()
    keep_on_host(model, CARD)
    assert all(tensor.cpu().equal(expected[name]) for name, tensor in model.state_dict().items())
    return bytes_of(model.parameters()), pinned() - before


def kept_activations():
    """Steps of several lengths take what the longest one needs."""
    before, needed, keep = pinned(), [], HostCopies.keep
    model = model_of().to(CARD)
    plain = copy.deepcopy(model)
    recompute_layers(model)
    offload_layer_inputs(model)
    HostCopies.keep = lambda copies, tensor: (
        needed.__setitem__(-1, needed[-1] + bytes_of([tensor])),
        keep(copies, tensor),
    )[1]
    for length in (170, 300, 200, 300):
        needed.append(0)
        ids = torch.arange(2 * length, device=CARD).view(2, length) % 640
        for each in (plain, model):
            each(input_ids=ids, labels=ids).loss.backward()
        pairs = zip(plain.parameters(), model.parameters())
        assert all(torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=1e-5, atol=1e-6) for one, other in pairs)
    return max(needed), pinned() - before


def main():
    values.install()
    print(
        json.dumps(
            {
                "torch's own": torchs_own(),
                "saves": staging_of_saves(),
                "a frozen model": frozen_model(),
                "activations": kept_activations(),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Recomputing, keeping the dear results and offloading: the same gradients, and only what they say is computed again."""

import copy

import pytest
import torch
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.cli.common import validate_shared
from trainer.cli.train_sft import parse
from trainer.errors import UserError
from trainer.models.activations import offload_layer_inputs, recompute_layers


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products, self.others = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dear = any(part in str(func) for part in ("aten.mm", "aten.addmm", "aten.bmm", "scaled_dot_product"))
        self.products, self.others = self.products + dear, self.others + (not dear)
        return func(*args, **(kwargs or {}))


def forward_and_backward(model) -> tuple[torch.Tensor, dict[str, torch.Tensor], CountProducts]:
    ids = torch.randint(0, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(5))
    model.train()
    with CountProducts() as count:
        logits = model(input_ids=ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 0].sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, count


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gradients_are_bitwise_the_same_and_only_cheap_results_are_computed_again(architecture):
    plain, again, selective, offloaded = (copy.deepcopy(make_model(architecture)) for _ in range(4))
    recompute_layers(again)
    recompute_layers(selective, selective=True)
    recompute_layers(offloaded)
    offload_layer_inputs(offloaded)
    logits, grads, count = forward_and_backward(plain)
    counts = {}
    for name, model in (("all", again), ("selective", selective), ("offloaded", offloaded)):
        its_logits, its_grads, counts[name] = forward_and_backward(model)
        assert torch.equal(its_logits, logits)
        assert all(torch.equal(its_grads[key], grads[key]) for key in grads)
    assert counts["all"].products == counts["offloaded"].products > count.products
    assert counts["selective"].products == count.products
    assert counts["selective"].others > count.others  # norms, embeddings of positions, activation functions


def test_what_is_kept_goes_to_the_host(monkeypatch):
    """On a GPU it is pinned host memory; here, that every layer's input passes through the offloading hooks is seen."""
    model = make_model("qwen3")
    recompute_layers(model)
    offload_layer_inputs(model)
    packed = []
    original = torch.autograd.graph.save_on_cpu.__init__

    def noting(self, *args, **kwargs):
        original(self, *args, **kwargs)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: (packed.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__init__", noting)
    forward_and_backward(model)
    hidden = (2, 17, model.config.hidden_size)
    assert packed.count(hidden) >= model.config.num_hidden_layers
    assert (model.config.vocab_size, model.config.hidden_size) not in packed  # no weight of head or embedding


@pytest.mark.parametrize("flags", [["--activation_offload"], ["--gradient_checkpointing", "--selective_checkpointing"]])
def test_what_excludes_each_other_is_refused(flags):
    with pytest.raises(UserError, match=flags[0]):
        validate_shared(parse(["--pretrain", "x", "--dataset", "y", *flags])[0], ())

"""Frozen weights that wait in host memory, storages that are emptied and filled again, and nested micro-batches."""

import torch

from trainer.datasets.batches.global_batches import to_device
from trainer.distributed.host_offload import added_to_earlier, bring_back, keep_on_host, take_to_host


def test_frozen_weights_are_on_the_device_only_during_a_forward_pass():
    """The meta device takes the role of an accelerator: operations on it show where the weights were."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).requires_grad_(False)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    keep_on_host(model, torch.device("meta"))
    seen = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.weight.device.type))
    for _ in range(2):
        assert model(torch.zeros(1, 3, device="meta")).device.type == "meta"
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, expected[name])
    assert seen == ["meta", "meta"]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, hidden):
        return self.inner(hidden)


def test_one_layer_at_a_time_is_on_the_device():
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(3, 3)).requires_grad_(False)
    model._no_split_modules = ["Block"]
    keep_on_host(model, torch.device("meta"))
    seen = []
    for part in model:
        part.register_forward_hook(lambda *_: seen.append([p.device.type for p in model.parameters()]))
    model(torch.zeros(1, 3, device="meta"))
    assert seen == [["cpu"] * 4 + ["meta"] * 2] * 3  # the hook of a block comes after its weights have gone
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    model[0].inner.register_forward_hook(lambda *_: seen.append([p.device.type for p in model.parameters()]))
    model(torch.zeros(1, 3, device="meta"))
    assert seen[3] == ["meta"] * 2 + ["cpu"] * 2 + ["meta"] * 2


def test_new_gradients_are_added_to_earlier_ones():
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    (one * 3).sum().backward()
    first = one.grad
    with added_to_earlier([one, other]):
        assert one.grad is None
        (one * 4 + other).sum().backward()
    assert one.grad is first and one.grad.tolist() == [7, 7] and other.grad.tolist() == [1, 1]
    with added_to_earlier([one]):
        pass  # a micro-batch that does not reach it
    assert one.grad.tolist() == [7, 7]


def test_a_failed_forward_pass_leaves_the_weights_on_the_host():
    model = keep_on_host(torch.nn.Linear(3, 3), torch.device("meta"))
    try:
        model(torch.zeros(1, 4, device="meta"))
    except RuntimeError:
        assert model.weight.device.type == "cpu"
    else:
        raise AssertionError("3 weights took 4 inputs")


def test_views_outlive_the_time_that_their_storage_is_away():
    """ZeRO's parameters are such views of its masters: one copy, no memory in between, the same values afterwards."""
    flat = torch.arange(6.0)
    view, other = flat[2:5], torch.full((3,), 7.0)
    copies = take_to_host([view, flat, other, torch.empty(0)])
    assert [storage.nbytes() for storage, _ in copies] == [0, 0]
    bring_back(copies)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5] and view.tolist() == [2, 3, 4] and other.tolist() == [7, 7, 7]
    flat[3] = -1
    assert view.tolist() == [2, -1, 4]


def test_a_batch_within_a_batch_moves_too():
    batch = {"a": torch.zeros(1), "n": 3, "inner": {"b": torch.zeros(2), "n": 4}}
    moved = to_device(batch, torch.device("meta"))
    assert moved["inner"]["b"].device.type == moved["a"].device.type == "meta"
    assert (moved["n"], moved["inner"]["n"]) == (3, 4)

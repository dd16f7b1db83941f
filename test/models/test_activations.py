"""Recomputing, keeping costly results and offloading: gradients stay the same, and only the named parts run again."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from tiny_models import make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention import varlen
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from trainer.cli.train_sft import parse
from trainer.errors import UserError
from trainer.flags.rules import refuse
from trainer.models.layers import activation_offload
from trainer.models.layers.activation_offload import HostCopies, offload_layer_inputs
from trainer.models.layers.activations import recompute_layers


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
    """Every layer's input passes through the offloading hooks. On a GPU, it would go to pinned host memory."""
    model = make_model("qwen3")
    recompute_layers(model)
    offload_layer_inputs(model)
    packed, keep = [], HostCopies.keep

    def noting(copies, tensor):
        packed.append(tuple(tensor.shape))
        return keep(copies, tensor)

    monkeypatch.setattr(HostCopies, "keep", noting)
    forward_and_backward(model)
    hidden = (2, 17, model.config.hidden_size)
    assert packed.count(hidden) >= model.config.num_hidden_layers
    assert (model.config.vocab_size, model.config.hidden_size) not in packed  # no weight of head or embedding


class LateStreams(TorchDispatchMode):
    """torch.cuda's functions for streams, on a CPU. A copy on another stream happens only when somebody waits for it.

    Before, what it will fill is NaN, as memory that a GPU has not written yet may be. `ahead` counts copies that were
    begun and not yet waited for.
    """

    def __init__(self, waits: bool = True):
        super().__init__()
        self.main, self.now, self.waits, self.queue, self.ahead = self, self, waits, [], []

    def Stream(self):
        return OtherStream(self)

    def current_stream(self):
        return self.now

    @contextlib.contextmanager
    def stream(self, other):
        self.now = other
        yield
        self.now = self.main

    def wait_event(self, number: int) -> None:
        self.ahead.append(sum(late is not None for late in self.queue))
        for place, late in enumerate(self.queue[:number] if self.waits else ()):
            if late is not None:
                late()
                self.queue[place] = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.now is self.main or func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        target.fill_(float("nan") if target.is_floating_point() else 0)
        self.queue.append(lambda: target.copy_(source))
        return target


class OtherStream:
    """Its work is the queue of the copies. An event is the length of the queue when it was recorded."""

    def __init__(self, streams: LateStreams):
        self.streams, self.waited = streams, False

    def wait_stream(self, stream) -> None:
        assert stream is self.streams
        self.waited = True

    def record_event(self) -> int:
        assert self.waited and self.streams.now is self
        self.waited = False  # a copy must wait for the work that was begun before it, each time
        return len(self.streams.queue)


def run_with_late_copies(model, monkeypatch, waits: bool):
    streams = LateStreams(waits)
    monkeypatch.setattr(activation_offload, "_streams", lambda device: streams)
    recompute_layers(model)
    offload_layer_inputs(model)
    with streams:
        return forward_and_backward(model)[1], streams


def test_copies_run_beside_the_layers_and_are_waited_for(monkeypatch):
    plain, offloaded, careless = (copy.deepcopy(make_model("qwen3")) for _ in range(3))
    expected = forward_and_backward(plain)[1]
    grads, streams = run_with_late_copies(offloaded, monkeypatch, waits=True)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert 1 < max(streams.ahead) <= 3 and not any(streams.queue)  # at least the next one is on its way
    grads, _ = run_with_late_copies(careless, monkeypatch, waits=False)
    assert any(grad.isnan().any() for grad in grads.values())  # so this test would notice a wait that is missing


@pytest.fixture(params=[1, 2])
def mesh(request):
    """Make a mesh of one rank, or of two ranks. Of the two, this is the first, and the other does not exist."""
    backend, store = ("gloo", dist.HashStore()) if request.param == 1 else ("fake", FakeStore())
    dist.init_process_group(backend, rank=0, world_size=request.param, store=store)
    yield init_device_mesh("cpu", (request.param,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()])
def test_a_distributed_tensor_comes_back_as_it_was(mesh, placement):
    """With tensor parallelism, layers keep tensors that are spread over the ranks. 7 columns give unequal parts."""
    local = torch.randn(3, 7 if mesh.size() == 1 or placement != Shard(1) else 4)
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size((3, 7)), stride=(7, 1))
    copies = HostCopies()
    kept = copies.keep(tensor)
    assert type(kept.host) is torch.Tensor and kept.host.data_ptr() != local.data_ptr()
    back = copies.give(kept)
    assert isinstance(back, DTensor) and torch.equal(back.to_local(), local)
    for name in ("shape", "device_mesh", "placements", "dtype", "device"):
        assert getattr(back, name) == getattr(tensor, name), name
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_gradients_of_distributed_tensors_pass_through_the_host(mesh):
    def grads(context):
        torch.manual_seed(0)
        leaves = [DTensor.from_local(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_() for _ in range(2)]
        with context:
            loss = torch.tanh(leaves[0] @ leaves[1]).square().sum()
        loss.backward()
        return [leaf.grad.full_tensor() for leaf in leaves]

    copies = HostCopies()
    hooks = torch.autograd.graph.saved_tensors_hooks(copies.keep, copies.give)
    for found, expected in zip(grads(hooks), grads(contextlib.nullcontext())):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("flags", [["--activation_offload"], ["--gradient_checkpointing", "--selective_checkpointing"]])
def test_what_excludes_each_other_is_refused(flags):
    with pytest.raises(UserError, match=flags[0]):
        refuse("train_sft", parse(["--pretrain", "x", "--dataset", "y", *flags])[0])


def counted_attention(op: str, calls: list) -> str:
    """Register attention that only scales the query, by a kernel that GPUs have and CPUs lack. `calls` counts it."""
    if op == "_varlen_attn":

        def forward(query, *others):
            calls.append(op)
            return 2 * query, query.new_zeros(1), query.new_zeros(1)

        varlen._varlen_attn.register_kernel("cpu")(forward)
        varlen._varlen_attn_backward.register_kernel("cpu")(
            lambda grad, query, key, value, *others: (2 * grad, torch.zeros_like(key), torch.zeros_like(value))
        )
        bounds = torch.tensor([0, 2, 4], dtype=torch.int32)

        def run(query, key):
            return torch.ops.torch_attn._varlen_attn(query, key, key, bounds, bounds, 2, 2)[0]
    else:

        @torch.library.custom_op(f"flash_attn::{op}", mutates_args=())
        def scaled(query: torch.Tensor) -> torch.Tensor:
            calls.append(op)
            return 2 * query

        scaled.register_autograd(lambda ctx, grad: 2 * grad)

        def run(query, key):
            return getattr(torch.ops.flash_attn, op)(query)

    def attention(module, query, key, value, *args, **kwargs):
        return run(query, key).transpose(1, 2), None

    AttentionInterface.register("counted", attention)
    return "counted"


@pytest.mark.parametrize("op", ["_varlen_attn", "_flash_attn_forward", "_flash_attn_varlen_forward"])
def test_the_kernels_of_gpus_run_once(op):
    calls, grads = [], []
    model = make_model("llama")
    model.set_attn_implementation(counted_attention(op, calls))
    for selective in (False, True):
        copied = copy.deepcopy(model)
        if selective:
            recompute_layers(copied, selective=True)
        found = forward_and_backward(copied)[1]
        grads.append({name: grad for name, grad in found.items() if grad is not None})  # keys may be left unused
        assert len(calls) == model.config.num_hidden_layers, selective
        calls.clear()
    assert grads[0].keys() == grads[1].keys() and all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])

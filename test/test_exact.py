"""--exact: sums that no order changes, an optimizer step that no place changes, and equal bits of whole runs."""

import contextlib
import functools
import itertools
import json
import math
import re
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact_models import save_models
from launch import FULL, forked, train_many
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MambaConfig
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from trainer.compare.locate.locate_report import locate_folders
from trainer.compare.runs.exact_bits import bits_of, first_difference
from trainer.datasets.batches.sequence_split import zigzag_shard
from trainer.errors import UserError
from trainer.exact import exact_products, self_test, split_rows
from trainer.exact.exact_adamw import ExactAdamW, with_single_roundings
from trainer.exact.exact_gradients import ExactGradients, add_within_modules_first
from trainer.exact.exact_reduction import flat_cut
from trainer.exact.exact_sums import (
    GRADIENT_GRID,
    add_to,
    from_grid,
    grid_of_squares,
    on_loss_grid,
    sum_of_squares,
    to_grid,
    with_exact_sums,
)
from trainer.exact.fixed_tree import num_pieces, tree_sum
from trainer.exact.sample_sums import Change, change_between, sums_of
from trainer.exact.split_rows import SplitRows, give_whole_rows
from trainer.flags.rule import UNKNOWN, defaults_of, first_broken
from trainer.flags.rules import COMMANDS, RULES
from trainer.model_folders.adapter_tensors import MergedWeights
from trainer.model_parallel.tensor_parallel import split_layers
from trainer.models import cpu_matmul
from trainer.models.attention import exact_attention
from trainer.strategies.on_deepspeed.zero_loading import read_stretch
from trainer.training.loop import forward_backward

self_test.ask_for_fixed_kernels()  # before any product of this process


def spread_values(n: int, seed: int = 0) -> torch.Tensor:
    """Values of many sizes, whose fp32 and fp64 sums depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 2, (n,), generator=generator)


def test_gradients_add_up_to_the_rounded_exact_sum_in_any_order():
    addends = spread_values(5000).view(500, 10)
    expected = [sum((Fraction(x) for x in column), Fraction(0)) / 3 for column in addends.T.double().tolist()]
    found = [from_grid(sum(map(to_grid, addends[order])), 3.0) for order in (torch.arange(500), torch.randperm(500))]
    parts = [sum(map(to_grid, part)) for part in addends.split([1, 137, 362])]
    found.append(from_grid(parts[2] + parts[0] + parts[1], 3.0))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    bound = 500 * GRADIENT_GRID / 2 / 3  # each addend is rounded once
    for value, exact in zip(found[0].tolist(), expected):
        assert abs(Fraction(value) - exact) <= bound + abs(exact) / 2**24
    assert not torch.equal(addends.sum(0), addends.flip(0).cumsum(0)[-1])  # plain sums do depend on the order


def test_the_sum_of_squares_is_that_of_any_order_and_of_any_shards():
    values = spread_values(100_003, seed=1)
    expected = math.fsum((values.double() ** 2).tolist())
    grid = grid_of_squares(values.abs().max().item(), len(values))
    found = {sum_of_squares(v, grid).item() for v in (values, values.flip(0), values[torch.randperm(len(values))])}
    found.add(sum(sum_of_squares(part, grid).item() for part in flat_cut("", values, 7)))
    assert len(found) == 1 and found.pop() * grid == pytest.approx(expected, rel=1e-11)
    assert 0 < sum_of_squares(values.abs().max().expand(len(values)), grid) < 2**62
    assert sum_of_squares(torch.zeros(3), grid_of_squares(0.0, 3)) == 0 == sum_of_squares(torch.zeros(0), 1.0)


@pytest.mark.parametrize("n", (0, 1, 3, 70_001))
def test_pieces_of_a_gradient_are_added_as_one(n):
    values = spread_values(2 * n, seed=5).view(2, n)
    sums = torch.zeros(n, dtype=torch.int64)
    largest = [add_to(sums, row) for row in values]
    assert sums.tolist() == [sum(round(Fraction(x) * 2**48) for x in column) for column in values.T.double().tolist()]
    assert max(largest) == (values.abs().max().item() if n else 0.0)
    assert n == 0 or add_to(sums, torch.full((n,), math.nan)) == math.inf


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_an_empty_micro_batch_does_not_count_for_the_limit_of_a_sum(one_rank):
    def norm(*slopes: float) -> float:
        gradients, weight = ExactGradients(one_rank, one_rank, one_rank), torch.zeros(1, requires_grad=True)
        for slope in slopes:
            gradients.add((weight * slope).sum(), {"weight": weight}, 1)
        gradients.reduce(1, lambda name, gradient: None)
        return gradients.norm

    slope = 20_000.0  # half of it is added: three fit below 2^15, four do not
    assert norm(slope, slope, slope) == norm(0.0, slope, slope, 0.0, slope) == 3 * slope
    assert norm(slope, slope, slope, slope) == norm(slope, slope, slope, 0.0, slope) == math.inf
    assert norm(math.nan, 0.0) == math.inf


def test_losses_add_up_exactly_and_keep_their_gradient():
    losses = spread_values(2000, seed=2).abs().requires_grad_()
    total = sum(map(on_loss_grid, losses))
    assert total.dtype == torch.float64
    assert total == sum(map(on_loss_grid, losses.flip(0)))
    assert torch.equal(torch.autograd.grad(total, losses)[0], torch.ones(2000))


class Rank:
    """One of two ranks. `others` are the totals of the other one, which are added to its own."""

    def __init__(self, others: float = 0.0):
        self.totals, self.others = None, others

    def all_reduce(self, totals: torch.Tensor) -> torch.Tensor:
        self.totals = totals
        return totals + self.others


def test_the_loss_of_many_tokens_is_the_exact_sum_on_any_number_of_ranks():
    losses = [on_loss_grid(value) for value in spread_values(512, seed=11).double() / 3 + 2048 * 11]

    def plain(model, sample: dict) -> tuple:
        return losses[sample["row"]], torch.tensor(1), {"same": losses[sample["row"]]}

    def found(rank: Rank, rows: range, loss_fn) -> dict:
        batch = SimpleNamespace(micro_batches=[{"row": row} for row in rows], num_targets=512)
        return forward_backward(rank, None, batch, loss_fn, train=False)[0]

    expected = float(sum(Fraction(loss.item()) for loss in losses))
    exact = with_exact_sums(plain)
    assert expected > 2**23 and sum(losses) != expected  # one fp64 sum is not exact
    assert found(Rank(), range(512), exact) == {"loss": expected, "same": expected}
    with contextlib.suppress(RuntimeError):  # half of the targets
        found(first := Rank(), range(100), exact)
    assert found(Rank(first.totals), range(100, 512), exact) == {"loss": expected, "same": expected}
    losses[7] = torch.tensor(math.inf)
    assert found(Rank(), range(512), plain)["loss"] == math.inf


class Zeros:
    """The weights of a base model, all zero."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape

    def read(self, name: str, region=None) -> torch.Tensor:
        return torch.zeros(self.shape)[region or ...]


@pytest.mark.parametrize("transposed", (False, True))
def test_slices_of_a_merged_weight_are_those_of_the_whole(transposed, tmp_path, as_in_a_ring):
    rows, columns, rank, name = 172, 64, 8, "proj.weight"
    a, b = spread_values(rank * columns).view(rank, columns), spread_values(rows * rank, seed=1).view(rows, rank)
    save_file(
        {f"base_model.model.proj.lora_{k}.weight": v for k, v in (("A", a), ("B", b))},
        tmp_path / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["proj"],
        "base_model_name_or_path": "x",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shape = (columns, rows) if transposed else (rows, columns)
    weights = MergedWeights(Zeros(shape), str(tmp_path), {name: shape}, transposed)
    whole = weights.read(name)
    torch.testing.assert_close(whole, (b @ a).T if transposed else b @ a, rtol=1e-5, atol=1e-5)
    for ranks in (2, 3, 8):
        size = -(-rows * columns // ranks)
        parts = [read_stretch(weights, name, shape, size * rank, size) for rank in range(ranks)]  # as ZeRO 3 does
        assert torch.equal(torch.cat(parts), whole.flatten())
        shards = [chunk.tolist() for chunk in torch.arange(shape[1]).chunk(ranks)]  # as tensor parallelism does
        regions = [(slice(0, shape[0]), slice(shard[0], shard[-1] + 1)) for shard in shards]
        assert torch.equal(torch.cat([weights.read(name, region) for region in regions], 1), whole)
    assert weights.read(name, (slice(5, 5), slice(0, shape[1]))).shape == (0, shape[1])  # FSDP2, more ranks than rows


def parameter_with_grad(values: torch.Tensor, grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = grad.clone()
    return parameter


def test_a_step_does_not_depend_on_the_place_of_an_element():
    values, options = spread_values(1003, seed=3), {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    grads = [spread_values(1003, seed=4 + step) for step in range(3)]

    def stepped(pieces: list[slice], kind) -> torch.Tensor:
        parts = [torch.nn.Parameter(values[piece].clone()) for piece in pieces]
        optimizer = kind(parts, **options)
        for grad in grads:
            for part, piece in zip(parts, pieces):
                part.grad = grad[piece].clone()
            optimizer.step()
        return torch.cat(parts).detach()

    whole = stepped([slice(None)], ExactAdamW)
    cuts = [0, 1, 3, 10, 27, 400, 413, 1003]
    assert torch.equal(whole, stepped([slice(*cut) for cut in itertools.pairwise(cuts)], ExactAdamW))
    torch.testing.assert_close(whole, stepped([slice(None)], torch.optim.AdamW), rtol=1e-5, atol=1e-7)


def test_the_exact_optimizer_has_the_groups_of_the_other():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "weight_decay": 0.5}, {"params": [weights[1]], "lr": 3.0}]
    exact = with_single_roundings(torch.optim.AdamW(groups, lr=2.0, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.0))
    assert [(g["lr"], g["weight_decay"], g["betas"], g["eps"]) for g in exact.param_groups] == [
        (2.0, 0.5, (0.1, 0.2), 1e-3), (3.0, 0.0, (0.1, 0.2), 1e-3),
    ]  # fmt: skip


class Block(torch.nn.Module):
    """A tensor that a norm uses twice and a residual once, as in every decoder layer."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return x + self.norm(x)


class Norm(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class WithNode(torch.nn.Module):
    """A module behind a node of a backend, as DeepSpeed's hooks make it."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.view_as(x))


def test_nodes_of_a_backend_do_not_change_the_order_of_gradients():
    x = spread_values(4096, seed=9).view(64, 64)

    def gradient(norm: torch.nn.Module, fixed: bool) -> torch.Tensor:
        model, leaf = torch.nn.Sequential(Block(norm)), x.clone().requires_grad_()
        if fixed:
            add_within_modules_first(model)
        return torch.autograd.grad((model(leaf * 1.0) ** 3).sum(), leaf)[0]

    assert not torch.equal(gradient(Norm(), False), gradient(WithNode(Norm()), False))  # what would go wrong
    assert torch.equal(gradient(Norm(), True), gradient(WithNode(Norm()), True))


def test_the_self_test_finds_kernels_that_depend_on_the_place_in_memory(monkeypatch):
    monkeypatch.setattr(self_test, "gather_objects", lambda value: [value])
    self_test.self_test()
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b: plain(x, w, b) * (1 + 1e-7 * (w.data_ptr() % 64 != 0)))
    found = r"--exact: a product of 1 x 64 and 64 x 96 changes on this machine with the place in memory. "
    with pytest.raises(UserError, match=found + "Remove the flag."):
        self_test.self_test()
    with pytest.raises(UserError, match=found + "Take --cpu_matmul mkl."):
        self_test.self_test(library="onednn")
    monkeypatch.setenv("MKL_CBWR", "OFF")
    with pytest.raises(UserError, match=found + "Unset MKL_CBWR, which is OFF."):
        self_test.self_test()


def test_the_shapes_of_a_model_are_tested_too(monkeypatch, as_in_a_ring):
    """A fault at a width that no fixed product has: columns out of a piece, of a piece of the columns in, and of a head."""
    monkeypatch.setattr(self_test, "gather_objects", lambda value: [value])
    sizes = {"hidden_size": 80, "intermediate_size": 8 * 44, "num_attention_heads": 10, "num_key_value_heads": 5}
    config = LlamaConfig(**sizes, head_dim=24, num_hidden_layers=1, vocab_size=8 * 36, sliding_window=20)
    model = AutoModelForCausalLM.from_config(config)
    shapes = self_test.shapes_of(model, split_layers(model))
    widths = {(80, 30), (80, 15), (30, 80), (80, 44), (44, 80), (80, 36)}
    assert set(shapes.products) == widths and [own[:3] for own in shapes.attention] == [(10, 5, 24)]
    self_test.test_shapes(shapes, splits_rows=True, decodes=True)
    plain, attention = F.linear, self_test.block_attention
    for inner, outer in widths:
        monkeypatch.setattr(
            F, "linear", lambda x, w, *b, at=(outer, inner): plain(x, w, *b) * (1 + 1e-6 * (w.shape == at and w.data_ptr() % 64 > 0))
        )  # fmt: skip
        with pytest.raises(UserError, match=f"a product of 24 x {inner} and {inner} x {outer} changes"):
            self_test.test_shapes(shapes)
        self_test.self_test()
        monkeypatch.setattr(
            F, "linear", lambda x, w, *b, at=(outer, inner): plain(x, w, *b) * (1 + 1e-6 * (w.shape == at and len(x) == 8))
        )  # fmt: skip
        with pytest.raises(UserError, match=f"a product with {inner} x {outer} changes .* with the number of rows"):
            self_test.test_shapes(shapes, splits_rows=True)
        self_test.self_test(splits_rows=True)
    monkeypatch.setattr(F, "linear", plain)
    faulty = lambda q, *rest: attention(q, *rest) * (1 + 1e-6 * (q.shape[1:] == (10, 1, 24)))  # noqa: E731
    monkeypatch.setattr(self_test, "block_attention", faulty)
    self_test.self_test(decodes=True)
    with pytest.raises(UserError, match="attention of one token has other bits than in its sample"):
        self_test.test_shapes(shapes, decodes=True)


def test_a_very_wide_product_is_tested_with_the_columns_of_its_end():
    config = LlamaConfig()
    head = torch.nn.Module()
    head.head, head.config = torch.nn.Linear(4096, 50_001, device="meta"), config
    [(inner, outer)] = self_test.shapes_of(head, {}).products
    assert self_test.shapes_of(SimpleNamespace(config=MambaConfig(), named_modules=list), {}) == self_test.Shapes(
        (), ()
    )
    assert inner == 4096 and inner * outer <= self_test.OWN_WEIGHTS and (50_001 - outer) % 64 == 0


def test_the_self_test_finds_a_rank_with_another_processor(monkeypatch):
    monkeypatch.setattr(self_test, "gather_objects", lambda value: [value, dict.fromkeys(value, "other")])
    with pytest.raises(UserError, match=r"between this rank and rank 1. Take ranks with processors of one kind"):
        self_test.self_test()


class OneOf:
    """A process group of `ranks`, of which this process is the only one that works."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


ALONE = exact_products.Ranks(OneOf(1), SplitRows(OneOf(1)))


def _copy_into(found: torch.Tensor, gathered: torch.Tensor, part: torch.Tensor, group) -> None:
    gathered.copy_(found)


@pytest.mark.parametrize("width", (172, 64, 6, 7))
def test_sums_over_pieces_are_those_of_any_number_of_ranks(width, monkeypatch):
    values = spread_values(9 * width, seed=6).view(9, width)
    terms = [piece.sum(1) for piece in values.chunk(num_pieces(width, 1), 1)]
    whole = tree_sum(terms, OneOf(1))
    for ranks in (n for n in (2, 4, 8) if width % n == 0):
        here = num_pieces(width // ranks, ranks)
        assert here * ranks == len(terms)
        sums = [tree_sum(terms[here * rank :][:here], OneOf(1)) for rank in range(ranks)]
        gathered = functools.partial(_copy_into, torch.cat(sums))
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_into_tensor", gathered)
            assert torch.equal(tree_sum(terms[:here], OneOf(ranks)), whole), ranks
    torch.testing.assert_close(whole.double(), values.double().sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ("columns", "rows"))
@pytest.mark.parametrize("has_bias", (True, False))
def test_products_in_pieces_are_those_of_a_linear_layer(kind, has_bias):
    shapes = [(5, 12), (20, 12)] + [(20,)] * has_bias
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seed = torch.randn(5, 20, dtype=torch.float64)
    expected = F.linear(*tensors)
    given = [*tensors, None][:3]
    found = exact_products.PRODUCTS[kind].apply(*given, ALONE)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(output, tensors, seed) for output in (found, expected)]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def as_in_a_ring():
    """One thread, and MKL for all products: an earlier test of this process may have left others."""
    threads, library = torch.get_num_threads(), cpu_matmul.chosen()
    torch.set_num_threads(1)
    cpu_matmul.choose_cpu_matmul("mkl")
    yield
    torch.set_num_threads(threads)
    cpu_matmul.choose_cpu_matmul(library)


def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(monkeypatch, as_in_a_ring):
    inputs, weight = spread_values(37 * 40, seed=8).view(1, 37, 40), spread_values(96 * 40, seed=9).view(96, 40)

    def found(start: int, end: int) -> list[torch.Tensor]:
        leaf = inputs[:, start:end].clone().requires_grad_()
        output = exact_products.PRODUCTS["columns"].apply(leaf, weight, None, ALONE)
        return [output, torch.autograd.grad(output.square().sum(), leaf)[0]]

    whole = found(0, 37)
    for parts in zip(*(found(*cut) for cut in itertools.pairwise((0, 1, 3, 14, 37)))):
        assert torch.equal(torch.cat(parts, 1), whole.pop(0))
    monkeypatch.setattr(self_test, "gather_objects", lambda value: [value])
    self_test.self_test(splits_rows=True)
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: plain(x, *rest) * (1 + 1e-6 * (len(x) == exact_products.ROWS)))
    with pytest.raises(UserError, match=r"--exact: a product with 64 x 96 changes .* Set --ring_attn_size to 1"):
        self_test.self_test(splits_rows=True)


def test_a_rank_has_one_thread_whatever_the_environment_says(as_in_a_ring):
    torch.set_num_threads(2)  # with two, a row of 12 columns has other bits among 8 rows than among 64
    self_test.ask_for_fixed_kernels()
    assert torch.get_num_threads() == 1
    rows, weight = spread_values(64 * 40, seed=10).view(64, 40), spread_values(12 * 40, seed=11).view(12, 40)
    assert torch.equal(F.linear(rows, weight)[:8], F.linear(rows[:8], weight))


@pytest.mark.parametrize("length", (7, 8, 9))
def test_a_split_window_has_the_mask_of_transformers(length):
    of_transformers = sdpa_mask(
        1, length, length, mask_function=sliding_window_causal_mask_function(8), local_size=8, allow_is_causal_skip=True
    )
    ours = exact_attention._window_mask(length, 8)
    assert (ours is None) == (of_transformers is None) == (length < 8)
    assert ours is None or torch.equal(ours, of_transformers)


def test_what_splits_samples_and_is_not_proved_is_refused_in_one_line(monkeypatch):
    mesh, split = OneOf(1), SplitRows(OneOf(2))
    with pytest.raises(UserError, match="--exact: with --ring_attn_size: Linear has no plan that keeps every bit"):
        exact_products.fix_products(torch.nn.Linear(2, 2), {}, mesh, split)
    with pytest.raises(UserError, match=r"--exact: the layer mixer, Conv1d, may add up the tokens of split samples"):
        give_whole_rows(torch.nn.ModuleDict({"mixer": torch.nn.Conv1d(2, 2, 1)}), split, {}, set())
    heads = torch.zeros(1, 3, 4, 8)
    with pytest.raises(UserError, match=r"--exact: ulysses over 2 ranks, which do not divide the 3 KV heads"):
        exact_attention.exact_attention("ulysses", split)(torch.nn.Module(), heads, heads, heads)
    with pytest.raises(UserError, match=r"--exact: equal bits are not proved for soft caps"):
        exact_attention.exact_attention("ring", split)(torch.nn.Module(), heads, heads, heads, softcap=1.0)


def test_a_pair_is_as_long_as_its_longer_side(monkeypatch):
    positions, counts = torch.tensor([[*range(7), 0], [*range(5), 0, 1, 2]]), []

    def all_reduce(count: torch.Tensor, group) -> None:
        counts.append(count.clone())
        count.copy_(sum(counts))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    split = SplitRows(OneOf(2))
    for split.rank in (0, 1):
        split_rows._count_tokens(split, None, (), {"position_ids": zigzag_shard(positions, split.rank, 2)})
    assert split.num_tokens == 7


UNPROVED = [
    ({"tensor_parallel_size": 2, "kd_top_k": 8}, "with --tensor_parallel_size and --kd_top_k"),
    ({"ring_attn_size": 2, "kd_loss": "jsd"}, "with --tensor_parallel_size or --ring_attn_size and --kd_loss jsd"),
    ({"tensor_parallel_size": 2, "sequence_parallel": True}, "with --use_hf_tp_plan or --sequence_parallel"),
    ({"ring_attn_size": 2, "dp_replicate_size": 2}, "with --ring_attn_size and --dp_replicate_size"),
    ({"ring_attn_size": 8}, "with --ring_attn_size 8"),
    ({"ring_attn_size": 2, "cpu_matmul": "onednn"}, "with --ring_attn_size and --cpu_matmul onednn"),
]


@pytest.mark.parametrize(("flags", "found"), UNPROVED, ids=[found for _, found in UNPROVED])
def test_a_layout_that_is_not_proved_is_refused_by_name(flags, found):
    defaults = defaults_of(COMMANDS.values()) | UNKNOWN
    proved = {**defaults, "exact": True, "param_dtype": "fp32"}
    rules = RULES["train_kd" if flags.keys() & {"kd_top_k", "kd_loss"} else "train_sft"]
    assert first_broken(rules, proved, defaults) is None
    assert str(first_broken(rules, proved | flags, defaults)).startswith(f"--exact {found}: ")


def test_a_vocabulary_that_tp_does_not_divide_is_refused():
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 7)})
    expected = "--tensor_parallel_size: with --exact, 2 does not divide the vocabulary of 7"
    with pytest.raises(UserError, match=expected):
        exact_products.fix_products(model, {"head": "vocabulary"}, OneOf(2), SplitRows(OneOf(1)))


def test_an_activation_rounds_an_element_in_the_same_way_at_the_end_of_a_tensor():
    inputs = spread_values(1000, seed=7)
    plain, found = torch.nn.SiLU(), []
    for size in (1000, 993, 7):
        values = inputs[:size].clone().requires_grad_()
        output = exact_products._without_tail(plain, values)
        found.append((output.detach(), torch.autograd.grad(output.sum(), values)[0]))
        torch.testing.assert_close(output, plain(values))
    for tensors in zip(*found):
        assert torch.equal(tensors[0][:993], tensors[1]) and torch.equal(tensors[0][:7], tensors[2])


# --- whole runs

SLOPES = (5500.0, 11_000.0)  # the largest of three gradients is then 0.29 and 0.58 of the limit of a sum
BACKENDS = {f"z{stage}": ["--backend", "deepspeed", "--zero_stage", str(stage)] for stage in range(4)}
BACKENDS["f"] = ["--backend", "fsdp2"]


def line(name: str, folder, data, *more: str) -> list[str]:
    """train_sft flags of a run named like "z3-mb2-packed". Few samples: the last batch of an epoch is short."""
    flags = ["--pretrain", f"{data}/models/stories260K-hf", "--dataset", f"{data}/gsm8k/train.jsonl"]
    flags += [
        "--input_key",
        "question",
        "--output_key",
        "answer",
        "--max_len",
        "200",
        "--max_samples",
        "13",
        "--max_steps",
        "2",
    ]
    flags += ["--learning_rate", "1e-3", "--weight_decay", "0.1", "--no_save", "--exact", "--param_dtype", "fp32"]
    flags += ["--train_batch_size", "8", *BACKENDS[name.split("-")[0]]]
    size = ["--micro_train_batch_size", "3" if "mb3" in name else "1"]
    flags += ["--max_tokens_per_micro_batch", "500"] if "tokens" in name else size
    flags += ["--dp_replicate_size", "2"] if "hsdp2" in name else []
    flags += ["--packing_samples"] if "packed" in name else []
    flags += ["--tensor_parallel_size", "2"] if "tp2" in name else []
    for mode in re.findall("ring|ulysses", name):
        flags += ["--ring_attn_size", name[name.index(mode) + len(mode)], "--sp_mode", mode]
    flags += ["--gradient_checkpointing"] if "recomputed" in name else []
    return [*flags, *more, "--output_dir", f"{folder}/{name}", "--parity_dump", f"{folder}/{name}/parity"]


def save_steep_models(folder: Path, source: str, slopes: Collection[float]) -> None:
    """The model of `source` with its last norm times each of `slopes`, which makes gradients of the head larger."""
    for slope in slopes:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.model.norm.weight.data *= slope
        for kind in (model, AutoTokenizer.from_pretrained(source)):
            kind.save_pretrained(folder / f"steep-{slope:g}")


def test_a_sum_that_may_overflow_is_noticed_on_each_layout(shared_data, tmp_path):
    """Three samples: two ranks add an empty micro-batch, which must not count. Twice the gradients are too large."""
    save_steep_models(tmp_path, f"{shared_data}/models/stories260K-hf", SLOPES)

    def of(name: str, slope: float) -> list[str]:
        more = ["--pretrain", f"{tmp_path}/steep-{slope:g}", "--max_samples", "3", "--max_steps", "1"]
        return line(f"{name}-{slope:g}", tmp_path, shared_data, *more)

    for ranks, names in ((1, ("f", "z1")), (2, ("z2", "f"))):
        with pytest.raises(AssertionError, match="error: step 1: loss or gradient norm not finite in the last 1 of 1"):
            train_many(ranks, [of(f"{name}-{ranks}", slope) for name, slope in zip(names, SLOPES)], tmp_path, 300)
    for slope, names in zip(SLOPES, (("f-1", "z2-2"), ("z1-1", "f-2"))):
        alone, pair = (bits_of(tmp_path / f"{name}-{slope:g}") for name in names)
        assert first_difference(alone, pair) is None
        assert alone.steps == 1 and math.isinf(alone.rows[1]["grad_norm"]) == (slope == SLOPES[1])


LORA = ("--lora_rank", "4", "--learning_rate", "1e-2")


def test_layouts_have_equal_bits_and_so_has_a_resume_on_another(shared_data, tmp_path):
    def of(name: str, *more: str) -> list[str]:
        return line(name, tmp_path, shared_data, *(LORA if "lora" in name else ()), *more)

    def resumed(name: str, source: str) -> list[str]:
        return of(name, "--load_checkpoint", str(tmp_path / source / "checkpoints/step_1"))

    alone, lora = ["f-mb3-packed", "z2-mb1"], ["z0-lora", "f-lora-mb3", "z3-lora"]
    save_models(str(tmp_path), f"{shared_data}/models/stories260K-hf", ["mixtral"])
    experts = ["f-experts", "z3-experts"]
    of_experts = [of(name, "--pretrain", str(tmp_path / "mixtral")) for name in experts]
    first = [of(alone[0], "--save_steps", "1"), of(alone[1]), of(lora[0], "--save_steps", "1")]
    train_many(1, [*first, of_experts[0]], tmp_path, 300)
    pair = ["f-mb1", "z1-tp2", "z3-mb3-recomputed", "f-tp2-recomputed", "f-ring2-mb3", "z1-ring2-packed"]
    lora += ["f-lora-tp2", "z3-lora-ring2"]
    later = [resumed("z3-tp2-resumed", alone[0]), resumed("f-lora-resumed", lora[0])]
    train_many(2, [*map(of, [*pair, *lora[1:]]), *later, of_experts[1]], tmp_path, 300)
    four = ["f-tp2-ring2", "z2-ring2-packed", "z3-ulysses4", "f-hsdp2-tokens"]
    train_many(4, list(map(of, four)), tmp_path, 300)
    assert first_difference(*(bits_of(tmp_path / name) for name in experts)) is None
    for names, resumed_name in (([*alone, *pair, *four], "z3-tp2-resumed"), (lora, "f-lora-resumed")):
        expected = bits_of(tmp_path / names[0])
        assert len(expected.tensors) == 2 and all(expected.tensors.values())
        assert expected.steps == 2 and len({row["loss"] for row in expected.rows.values()}) == 2
        for name in names[1:]:
            assert first_difference(expected, bits_of(tmp_path / name)) is None, name
        found = bits_of(tmp_path / resumed_name)
        assert list(found.rows) == [2] and found.rows[2] == expected.rows[2]
        assert found.tensors["weights_final.safetensors"] == expected.tensors["weights_final.safetensors"]


def test_a_gradient_that_is_off_by_one_ulp_is_found_and_named(tmp_path):
    for name in ("plain", "planted"):
        gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
        if name == "planted":
            gradients["b"][1] = torch.nextafter(gradients["b"][1], torch.tensor(5.0))
        (tmp_path / name / "parity").mkdir(parents=True)
        save_file(gradients, tmp_path / name / "parity/grads_step1.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "grad_norm": 2.0, "lr": 0.1}\n')
    plain, planted = bits_of(tmp_path / "plain"), bits_of(tmp_path / "planted")
    assert first_difference(plain, plain) is None
    expected = "grads_step1.safetensors: b differs in 1 of 2 elements, first at (1,), by up to 1 ulp"
    assert first_difference(plain, planted) == expected


def test_other_commands_have_equal_bits_too(shared_data, tmp_path):
    """train_dpo with its reference, train_rm with its new head, train_kd with a teacher: other backends and ranks."""
    save_steep_models(tmp_path, f"{shared_data}/models/stories260K-hf", [1.5])
    data = ["--dataset", f"{shared_data}/gsm8k/pairs.jsonl", "--train_batch_size", "8", "--max_samples", "13"]

    def of(command: str, name: str) -> list[str]:
        flags = ["--pretrain", f"{shared_data}/models/stories260K-hf", *data, "--max_len", "160", "--max_steps", "2"]
        flags += ["--learning_rate", "1e-3", "--no_save", "--exact", "--param_dtype", "fp32"]
        flags += ["--tensor_parallel_size", "2"] if "tp2" in name else []
        flags += ["--ring_attn_size", "2"] if "ring2" in name else []
        flags += [*BACKENDS[name.split("-")[0]], "--micro_train_batch_size", "2" if "mb2" in name else "1"]
        flags += ["--packing_samples"] if "packed" in name else []
        teacher = ["--teacher", f"{tmp_path}/steep-1.5", "--output_key", "chosen", "--kd_coef", "0.3"]
        flags += [*teacher, "--input_key", "prompt"] if command == "train_kd" else []
        folder = tmp_path / f"{command}-{name}"
        return [command, *flags, "--output_dir", str(folder), "--parity_dump", str(folder / "parity")]

    train_many(1, [of("train_dpo", "z1"), of("train_rm", "f"), of("train_kd", "f")], tmp_path, 300)
    pairs = [
        ("train_dpo-z1", ["z2-ring2", "f-mb2-packed", *["z3-tp2"] * FULL]),
        ("train_rm-f", ["z1-tp2", "f-ring2", *["z3-mb2"] * FULL]),
        ("train_kd-f", ["f-tp2", "z3-ring2", *["z2-mb2-packed"] * FULL]),
    ]
    train_many(2, [of(alone.partition("-")[0], name) for alone, names in pairs for name in names], tmp_path, 300)
    for alone, names in pairs:
        expected = bits_of(tmp_path / alone)
        assert expected.steps == 2 and len(expected.tensors) == 2
        assert len({row["loss"] for row in expected.rows.values()}) == 2
        for name in names:
            found = bits_of(tmp_path / f"{alone.partition('-')[0]}-{name}")
            assert first_difference(expected, found) is None, (alone, name)


def test_three_sums_tell_the_element_that_changed():
    values = to_grid(spread_values(3000, seed=11)).view(30, 100)
    changed = values.clone()
    changed[17, 83] -= 7
    assert change_between(sums_of(values), sums_of(changed), 3000) == Change(1783, -7)
    changed[0, 0] += 1
    assert change_between(sums_of(values), sums_of(changed), 3000) == Change()
    assert change_between(sums_of(values), sums_of(values.clone()), 3000) is None


def test_one_ulp_in_the_gradient_of_one_rank_is_located(shared_data, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"

    def of(run: str) -> list[str]:
        return line(run, tmp_path, shared_data, "--max_steps", "1", "--parity_trace", f"{tmp_path}/{run}/parity")

    train_many(1, [of("f-mb3-packed")], tmp_path, 300)
    train_many(2, [of("z1-mb1")], tmp_path, 300)
    (tmp_path / "runs.json").write_text(json.dumps([of("z3-mb1")]))
    code, output = forked(2, "test/planted_ulp.py", str(tmp_path / "runs.json"), name, timeout=300)
    assert code == 0, output[-6000:]
    folders = [tmp_path / run for run in ("f-mb3-packed", "z1-mb1", "z3-mb1")]
    assert locate_folders(folders[:2], None)
    assert not locate_folders(folders[::2], str(tmp_path / "found.json"))
    [found] = json.loads((tmp_path / "found.json").read_text())["partings"]
    assert found["where"] == name and found["ranks"] == [0, 1]
    assert found["change"].startswith("one element, (0, 5), by ")

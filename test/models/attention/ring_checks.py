"""Checks of attention over a split sequence, run by test_ring_attention.py: `torchrun ring_checks.py`.

Every rank draws the same examples. All ranks agree on a failure before any rank raises, so no rank is left waiting in a
collective. Prints "ok NAME" and the worst error per check.
"""

import datetime
import math
import types

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DogeConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded, shifted_labels
from trainer.datasets.batches.sequence_split import split_micro_batch, zigzag_shard
from trainer.entry import end_well
from trainer.errors import UserError
from trainer.models.attention.choice import register_ring_attention
from trainer.models.losses.token_losses import token_log_probs

MODES = ("ring", "ulysses")
WORST: dict[str, float] = {}
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "attention_dropout": 0.0,
}  # fmt: skip
CONFIGS = [
    LlamaConfig(**SMALL),
    Qwen3Config(**SMALL, tie_word_embeddings=True),
    MistralConfig(**SMALL, sliding_window=7),
]


def plain_attention(query, key, value, bounds, window, scale):
    """Compute attention by definition, with a (tokens x tokens) mask. In and out: (rows, heads, tokens, head_dim)."""
    num_tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    position = torch.arange(num_tokens)
    document = torch.bucketize(position, torch.tensor(bounds[1:]), right=True)
    distance = position[:, None] - position[None]
    visible = (document[:, None] == document[None]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return weights @ value.repeat_interleave(group, 1)


def outputs_and_gradients(attention, query, key, value, dout):
    """Return [out, dquery, dkey, dvalue] of a function of three leaves, for one fixed gradient of the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def split_attention(mode, query, key, value, dout, bounds, window, scale, packed=True, group=None):
    """Return this rank's zigzag shards of the same four tensors, from the function that transformers would call."""
    group = group or dist.group.WORLD
    call = AttentionInterface()[register_ring_attention(group, mode, packed)]
    module = types.SimpleNamespace(is_causal=True)
    ends = torch.tensor(bounds) if packed else None
    options = {"scaling": scale, "sliding_window": window, "cu_seqlens": ends, "cu_seqlens_host": ends}
    shards = zigzag_shards([query, key, value, dout], group)
    return outputs_and_gradients(lambda q, k, v: call(module, q, k, v, None, **options)[0].transpose(1, 2), *shards)


def zigzag_shards(tensors: list, group=None) -> list:
    group = group or dist.group.WORLD
    return [zigzag_shard(tensor, group.rank(), group.size(), dim=2) for tensor in tensors]


def error(found, expected) -> float:
    """Return the relative norm of the difference or its largest element, whichever is larger, over all ranks' shards.

    Where every query sees only one key, exact zeros are expected. So the divisors are at least 1.
    """
    difference = (found.double() - expected.double()).flatten()
    squares = torch.stack([difference.square().sum(), expected.double().square().sum()])
    dist.all_reduce(squares)
    largest = torch.stack([difference.abs().max(), expected.double().abs().max()])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    (norm, expected_norm), (element, expected_element) = squares.sqrt().tolist(), largest.tolist()
    return max(norm / max(expected_norm, 1.0), element / max(expected_element, 1.0))


def compare(name: str, found: list, expected: list, tolerance: float, example) -> None:
    """Raise on all ranks if the error of one of the tensors is above `tolerance` on any rank."""
    for tensor_name, one, other in zip(("out", "dquery", "dkey", "dvalue"), found, expected):
        value = error(one, other)
        WORST[f"{name} {tensor_name}"] = max(WORST.get(f"{name} {tensor_name}", 0.0), value)
        assert value <= tolerance, f"{name}: {tensor_name} is off by {value:.2e} > {tolerance} in {example}"


@st.composite
def attention_cases(draw, heads_divide_by: int):
    """Draw the sizes of an attention problem: one packed row, or several padded rows."""
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6 if packed else 1))
    num_kv_heads = heads_divide_by * draw(st.integers(1, 2))
    return {
        "packed": packed,
        "lengths": lengths,
        "rows": 1 if packed else draw(st.integers(1, 3)),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([8, 12, 16, 24, 32])),
        "window": draw(st.none() | st.integers(1, 30)),
        "scale": draw(st.sampled_from([0.15, 0.3, 0.5])),
        "seed": draw(st.integers(0, 2**16)),
    }


def make_tensors(case: dict, dtype: torch.dtype):
    """Return bounds and [query, key, value, dout]: (rows, heads, tokens, head_dim), strided as in transformers."""
    bounds = torch.tensor([0, *case["lengths"]]).cumsum(0).tolist()
    num_tokens = bounds[-1] + -bounds[-1] % (2 * dist.get_world_size())
    bounds = sorted({*bounds, num_tokens}) if case["packed"] else [0, num_tokens]
    generator = torch.Generator().manual_seed(case["seed"])

    def random(num_heads):
        shape = (case["rows"], bounds[-1], num_heads, case["head_dim"])
        return torch.randn(shape, generator=generator).to(dtype).transpose(1, 2)

    heads, kv_heads = case["num_heads"], case["num_kv_heads"]
    return [random(heads), random(kv_heads), random(kv_heads), random(heads)], bounds


def check_random_attention(mode: str, dtype: torch.dtype, tolerance: float, num_examples: int) -> None:
    """Output and gradients equal plain attention in float64, for any packing, padding, heads and window."""
    divisor = dist.get_world_size() if mode == "ulysses" else 1

    @settings(
        max_examples=num_examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=attention_cases(divisor))
    def check(case):
        tensors, bounds = make_tensors(case, dtype)
        options = bounds, case["window"], case["scale"]
        found = split_attention(mode, *tensors, *options, packed=case["packed"])
        expected = outputs_and_gradients(lambda *qkv: plain_attention(*qkv, *options), *[t.double() for t in tensors])
        compare(f"{mode} {dtype}", found, zigzag_shards(expected), tolerance, case)
        assert all(tensor.dtype == dtype for tensor in found)

    check()


def check_edges() -> None:
    """One token in total, documents shorter than the group, chunks of only padding, a window of one, few KV heads."""
    size = dist.get_world_size()
    for lengths, window, num_kv_heads in (
        ([1], None, size),
        ([1] * (2 * size + 1), None, size),
        ([2, 1, 3], 2, size),
        ([5 * size], 1, size),
        ([4 * size], 3, size),
        ([9, 4 * size], 5, 1),  # the ranks do not divide the KV heads
        ([9, 4 * size], None, size + 1),
    ):
        for packed in (True, False):
            case = {
                "packed": packed, "lengths": lengths, "rows": 1 if packed else 2, "num_kv_heads": num_kv_heads,
                "num_heads": 2 * math.lcm(num_kv_heads, size), "head_dim": 8, "window": window, "scale": 0.3, "seed": 1,
            }  # fmt: skip
            tensors, bounds = make_tensors(case, torch.float32)
            plain = outputs_and_gradients(
                lambda *qkv, options=(bounds, window, 0.3): plain_attention(*qkv, *options),
                *[tensor.double() for tensor in tensors],
            )
            for mode in MODES:
                found = split_attention(mode, *tensors, bounds, window, 0.3, packed)
                compare(f"{mode} edges", found, zigzag_shards(plain), 1e-5, case)


def check_long_bf16() -> None:
    """A split of a long row adds nothing to the bf16 error of the same attention on one rank."""
    size = dist.get_world_size()
    case = {
        "packed": True, "lengths": [500, 37, 231], "rows": 1, "num_kv_heads": size, "num_heads": 2 * size,
        "head_dim": 32, "window": None, "scale": 0.18, "seed": 2,
    }  # fmt: skip
    tensors, bounds = make_tensors(case, torch.bfloat16)
    options = bounds, None, 0.18
    exact = outputs_and_gradients(lambda *qkv: plain_attention(*qkv, *options), *[t.double() for t in tensors])
    myself = [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    for mode in MODES:
        found = split_attention(mode, *tensors, *options)
        alone = zigzag_shards(split_attention(mode, *tensors, *options, group=myself))
        for name, one, single, expected in zip(("out", "dquery", "dkey", "dvalue"), found, alone, zigzag_shards(exact)):
            split_error, single_error = (relative_error(tensor, expected) for tensor in (one, single))
            WORST[f"{mode} long bf16 {name}"] = split_error
            WORST[f"{mode} long bf16 {name} on one rank"] = single_error
            assert split_error <= 1.05 * single_error, f"{mode} {name}: {split_error:.2e} against {single_error:.2e}"


def relative_error(found, expected) -> float:
    """Return the norm of the difference, divided by the norm of the expected values, over all ranks' shards."""
    squares = torch.stack([(found.double() - expected).square().sum(), expected.square().sum()])
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def check_groups_side_by_side() -> None:
    """Groups with ranks other than 0, 1, ... each work on their own rows, as in a mesh with sp and tp or dp."""
    world = dist.get_world_size()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    assert world == 4
    mine = dist.get_rank() % 2
    case = {
        "packed": True, "lengths": [21, 4, 15], "rows": 1, "num_kv_heads": 2, "num_heads": 4, "head_dim": 8,
        "window": None, "scale": 0.3, "seed": 5 + mine,
    }  # fmt: skip
    tensors, bounds = make_tensors(case, torch.float32)
    options = bounds, None, 0.3
    plain = outputs_and_gradients(lambda *qkv: plain_attention(*qkv, *options), *[t.double() for t in tensors])
    for mode in MODES:
        found = split_attention(mode, *tensors, *options, group=groups[mine])
        compare(f"{mode} side by side", found, zigzag_shards(plain, groups[mine]), 1e-5, case)


def check_bitwise_repeatable() -> None:
    """The same inputs twice give the same bits, forward and backward."""
    case = {
        "packed": True, "lengths": [33, 60, 7], "rows": 1, "num_kv_heads": dist.get_world_size(),
        "num_heads": 2 * dist.get_world_size(), "head_dim": 16, "window": 20, "scale": 0.3, "seed": 3,
    }  # fmt: skip
    tensors, bounds = make_tensors(case, torch.float32)
    for mode in MODES:
        first, second = (split_attention(mode, *tensors, bounds, 20, 0.3) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second))


def check_saved_memory() -> None:
    """Between the passes, the ring keeps only this rank's query, key, value, out and lse."""
    size, saved = dist.get_world_size(), {}

    def note(tensor):
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    call = AttentionInterface()[register_ring_attention(dist.group.WORLD, "ring")]
    query, key = torch.randn(1, 24, 4, 16), torch.randn(1, 24, 2, 16)  # 24 local tokens
    leaves = [tensor.transpose(1, 2).requires_grad_() for tensor in (query, key, key.clone())]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ends = torch.tensor([0, 10, 24 * size])
        call(torch.nn.Module(), *leaves, None, cu_seqlens=ends, cu_seqlens_host=ends)
    assert sum(saved.values()) == 4 * 24 * (4 * 16 + 2 * 16 + 2 * 16 + 4 * 16 + 4)


def check_refusals() -> None:
    """Calls that would compute wrong results are refused before any communication."""
    size = dist.get_world_size()
    tensors = [torch.zeros(1, size, 4, 8)] * 3
    for mode in MODES:
        call = AttentionInterface()[register_ring_attention(dist.group.WORLD, mode)]
        for mask, option in ((torch.ones(1, 1, 4, 4), {}), (None, {"position_bias": torch.ones(1)}),
                             (None, {"dropout": 0.1}), (None, {"is_causal": False})):  # fmt: skip
            expect_refusal("--ring_attn_size", call, torch.nn.Module(), *tensors, mask, **option)
        windowed = torch.nn.Module()
        windowed.config = DogeConfig(sliding_window=7)
        expect_refusal("--ring_attn_size", call, windowed, *tensors)
        call = AttentionInterface()[register_ring_attention(dist.group.WORLD, mode, packed=True)]
        expect_refusal("--packing_samples", call, torch.nn.Module(), *tensors)
    odd = torch.zeros(1, size + 1, 4, 8), *[torch.zeros(1, 1, 4, 8)] * 2
    ends = torch.tensor([0, 4 * size])
    refusal = expect_refusal("--sp_mode", call, torch.nn.Module(), *odd, cu_seqlens=ends, cu_seqlens_host=ends)
    assert refusal.allowed.startswith("ring; ulysses with --ring_attn_size 1, ")


def expect_refusal(where: str, function, *arguments, **options) -> UserError:
    try:
        function(*arguments, **options)
    except UserError as refusal:
        assert refusal.where == where, refusal
        return refusal
    raise AssertionError(f"no refusal by {where}")


def make_samples() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    lengths = (13, 2, 30, 1, 6)
    ids = [torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "loss_mask": [int(t % 5 != 1) for t in range(len(row))]} for row in ids]


def alone(config, samples: list[dict]) -> tuple[float, int, dict]:
    """Return loss sum, count and gradients of a model that sees one sample at a time: not padded, packed or split."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    total = 0.0
    num_loss_tokens = 0
    for sample in samples:
        labels = torch.tensor([shifted_labels(sample["input_ids"], sample["loss_mask"])])
        logits = model(input_ids=torch.tensor([sample["input_ids"]]), use_cache=False).logits
        loss, count = -token_log_probs(logits, labels).sum(), (labels != IGNORE).sum()
        loss.backward()
        total, num_loss_tokens = total + loss.item(), num_loss_tokens + int(count)
    return total, num_loss_tokens, {name: p.grad for name, p in model.named_parameters()}


def split(config, batch: dict, mode: str, checkpointing: bool) -> tuple[float, int, dict]:
    """Return the same values from a model that runs split over all ranks, summed over the ranks."""
    torch.manual_seed(0)
    name = register_ring_attention(dist.group.WORLD, mode, packed="cu_seqlens" in batch)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shard = split_micro_batch(batch, dist.get_rank(), dist.get_world_size())
    inputs = {key: tensor for key, tensor in shard.items() if key != "labels"}
    loss = -token_log_probs(model(**inputs, use_cache=False).logits, shard["labels"]).sum()
    count = (shard["labels"] != IGNORE).sum()
    loss.backward()
    sums = torch.stack([loss.detach().double(), count.double()])
    dist.all_reduce(sums)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return sums[0].item(), int(sums[1]), gradients


def check_models() -> None:
    """Loss and all gradients of a whole model equal the values of one process that sees one sample at a time."""
    samples = make_samples()
    for config in CONFIGS:
        loss, count, gradients = alone(config, samples)
        for mode in MODES:
            for collate in (collate_packed, collate_padded):
                for checkpointing in (False, True):
                    case = f"{config.model_type} {mode} {collate.__name__} checkpointing {checkpointing}"
                    found = split(config, collate(samples, 0), mode, checkpointing)
                    assert found[1] == count and found[2].keys() == gradients.keys(), case
                    note_model_error("model loss", abs(found[0] / loss - 1), 1e-6, case)
                    for name, gradient in gradients.items():
                        off = (found[2][name] - gradient).norm() / gradient.norm()
                        note_model_error("model gradient", off.item(), 1e-5, f"{case} {name}")


def note_model_error(name: str, value: float, tolerance: float, case: str) -> None:
    WORST[name] = max(WORST.get(name, 0.0), value)
    assert value <= tolerance, f"{case}: off by {value:.2e} > {tolerance}"


def run(name: str, check, *arguments) -> None:
    check(*arguments)
    if dist.get_rank() == 0:
        print(f"ok {name}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    for each_mode in MODES:
        run(f"{each_mode} fp32", check_random_attention, each_mode, torch.float32, 1e-5, 25)
        run(f"{each_mode} bf16", check_random_attention, each_mode, torch.bfloat16, 1e-2, 25)
    for each_check in (check_edges, check_long_bf16, check_bitwise_repeatable, check_saved_memory, check_refusals):
        run(each_check.__name__, each_check)
    if dist.get_world_size() == 2:  # the tiny models have two KV heads
        run("check_models", check_models)
    if dist.get_world_size() == 4:
        run("check_groups_side_by_side", check_groups_side_by_side)
    if dist.get_rank() == 0:
        for what, worst in sorted(WORST.items()):
            print(f"worst {what}: {worst:.2e}")
    end_well()

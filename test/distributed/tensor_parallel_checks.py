"""Exactness of tensor parallelism on four ranks. test_tensor_parallel.py runs it by torchrun with FOLDER and RUNS.

FOLDER contains a tiny random model per architecture (tiny_models.py) and the demo. A plain loop trains each model for
a few steps, one sample per forward pass. The strategy trains it too. Each check prints "ok RUN" with the worst
relative differences.
"""

import contextlib
import functools
import io
import itertools
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.datasets.batches.packing import IGNORE, collate_packed, collate_padded
from trainer.entry import end_well
from trainer.errors import UserError
from trainer.methods.sft import sft_loss
from trainer.models.attention.choice import resolve_attention
from trainer.models.layers.activations import recompute_layers
from trainer.models.losses import linear_loss, token_losses
from trainer.models.losses.vocab_parallel import vocab_parallel_nll
from trainer.models.model_loading import disable_dropout, has_sdpa
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.fsdp2 import FSDP2Strategy
from trainer.strategies.options import StrategyOptions
from trainer.training.loop import forward_backward, inspect_gradients

STEPS = 4
LR = 1e-2
LAYOUTS = {
    "dp2-tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "dp2-tp2-sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "tp4-sequence": {"tensor_parallel_size": 4, "sequence_parallel": True},
    "dp2-tp2-hf": {"tensor_parallel_size": 2, "use_hf_tp_plan": True},
    "hsdp2-tp2": {"tensor_parallel_size": 2, "dp_replicate_size": 2},
    "hsdp2-dp2": {"dp_replicate_size": 2},
    "z0": {"zero_stage": 0},
    "z1": {"zero_stage": 1},
    "z3": {"zero_stage": 3},
    "z0-dp2-tp2": {"zero_stage": 0, "tensor_parallel_size": 2},
    "z1-dp2-tp2": {"zero_stage": 1, "tensor_parallel_size": 2},
    "z3-tp4": {"zero_stage": 3, "tensor_parallel_size": 4},
    "z3-dp2-tp2-hf": {"zero_stage": 3, "tensor_parallel_size": 2, "use_hf_tp_plan": True},
}


class Samples(list):
    """Rows that return a column for a name, like a datasets.Dataset."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)


def make_samples(vocab_size: int, num_samples: int = 7) -> Samples:
    """Make samples of very different lengths. The first ids are common, so the id of padding, 0, is trained as well."""
    generator = torch.Generator().manual_seed(0)
    samples = Samples()
    for number in range(num_samples):
        length = 5 + 4 * number
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        counts = {"num_tokens": length, "num_loss_tokens": length - 2, "digest": f"{number:016x}"}
        samples.append({"input_ids": ids, "loss_mask": [0, 0, *[1] * (length - 2)], **counts})
    return samples


def plain_run(folder: str, samples: Samples) -> dict:
    """Return losses, gradient norms, gradients of step 1 and final weights of the plain loop."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    num_targets = sum(sum(sample["loss_mask"][1:]) for sample in samples)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        total = 0.0
        for sample in samples:
            ids, mask = torch.tensor([sample["input_ids"]]), torch.tensor(sample["loss_mask"]).bool()
            tokens = F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
            loss = tokens[mask[1:]].sum() / num_targets
            loss.backward()
            total += loss.item()
        if step == 0:
            named = model.named_parameters()
            grads = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def full(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in tensors}


def make(folder: str, samples: Samples, packed: bool, dtype: str = "fp32", recompute: bool = False, **options):
    """Return (strategy, model, optimizer, scheduler, loader) on a layout."""
    strategy_class = DeepspeedStrategy if "zero_stage" in options else FSDP2Strategy
    strategy = strategy_class(StrategyOptions(param_dtype=dtype, **options))
    strategy.setup_distributed()
    attention = resolve_attention("sdpa", packed) if has_sdpa(folder, AutoModelForCausalLM, False) else "eager"
    model = strategy.load_model(folder, AutoModelForCausalLM, attn_implementation=attention)
    disable_dropout(model)
    if recompute:
        recompute_layers(model)
    optimizer = strategy.create_optimizer(model, lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    model.train()
    loader = strategy.setup_dataloader(
        samples,
        functools.partial(collate_packed if packed else collate_padded, pad_token_id=0),
        batch_size=len(samples),
        micro_batch_size=2,
        packed_capacity=64 if packed else None,
        shuffle=False,
    )
    return strategy, model, optimizer, scheduler, loader


def strategy_run(folder: str, samples: Samples, packed: bool, **options) -> dict:
    strategy, model, optimizer, scheduler, loader = make(folder, samples, packed, **options)
    losses, norms, grads = [], [], {}
    for step in range(STEPS):
        loader.load_state_dict({"epoch": 0, "next_index": 0})
        sums, count = forward_backward(strategy, model, next(iter(loader)), sft_loss, train=True)
        loss_sum = sums["loss"]
        if step == 0:
            assert all("vision" in name for name in strategy.unreached_parameters(model))
            grads = full(strategy.iter_full_grads(model))
        losses.append(loss_sum / count)
        norms.append(strategy.optimizer_step(optimizer, model, scheduler))
    strategy.check_replicas(model)
    weights = full(strategy.iter_full_params(model))
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def worst_difference(run: dict, expected: dict, key: str) -> float:
    """Return the largest relative difference of numbers, or of tensors in units of their own norm."""
    if isinstance(run[key], list):
        return torch.tensor([abs(a - b) / abs(b) for a, b in zip(run[key], expected[key])]).max().item()
    assert run[key].keys() == expected[key].keys(), run[key].keys() ^ expected[key].keys()
    pairs = ((tensor.double(), expected[key][name].double()) for name, tensor in run[key].items())
    differences = {name: float((a - b).norm() / b.norm()) for name, (a, b) in zip(run[key], pairs)}
    assert all(difference <= 1e-4 for difference in differences.values()), (key, differences)
    name = max(differences, key=differences.get)
    return differences[name]


def check(folder: str, architecture: str, layout: str, packed: bool, samples: Samples, expected: dict) -> None:
    run = strategy_run(f"{folder}/{architecture}", samples, packed, **LAYOUTS[layout])
    worst = {key: worst_difference(run, expected, key) for key in ("losses", "norms", "grads", "weights")}
    if dist.get_rank() == 0:
        kind = "packed" if packed else "padded"
        found = " ".join(f"{key} {value:.1e}" for key, value in worst.items())
        print(f"ok {architecture} {layout} {kind} {found}", flush=True)  # one text: other ranks may write between two
    assert worst["losses"] <= 1e-5 and worst["norms"] <= 1e-4, (worst, run["losses"], expected["losses"])


def check_vocab_parallel_loss(folder: str) -> None:
    """9 words on 4 ranks are parts of 3, 3, 3 and 0. Logits in the thousands overflow without the global maximum."""
    generator = torch.Generator().manual_seed(0)
    logits = 1000 * torch.randn(2, 6, 9, generator=generator)
    labels = torch.tensor([[IGNORE, 0, 3, 8, 5, IGNORE], [2, 2, IGNORE, 7, 6, 1]])
    whole = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    start = min(3 * dist.get_rank(), 9)
    part = logits[..., start : start + 3].clone().requires_grad_()
    keep = labels != IGNORE
    loss = vocab_parallel_nll(part[keep], labels[keep], start, dist.group.WORLD).sum()
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-6), (loss, expected)
    assert torch.allclose(part.grad, whole.grad[..., start : start + 3], atol=1e-6)
    nothing = vocab_parallel_nll(part[:0, 0], labels[:0, 0], start, dist.group.WORLD)
    assert nothing.shape == (0,)


def check_sentinel(folder: str) -> None:
    """If one rank changes one bit of a replica, every rank reports its name and axis."""
    cases = [("model.norm.weight", "tp", LAYOUTS["dp2-tp2"]), ("lm_head.weight", "dp_replicate", LAYOUTS["hsdp2-tp2"])]
    for name, axis, layout in cases:
        strategy, model, *_ = make(f"{folder}/qwen3", make_samples(97), packed=False, **layout)
        strategy.check_replicas(model)
        if dist.get_rank() == 1:
            local = dict(model.named_parameters())[name].to_local()
            local.view(torch.int32).flatten()[0] ^= 1
        try:
            strategy.check_replicas(model)
        except UserError as error:
            assert f"{name} differs between ranks of the mesh axis {axis}" in str(error), error
        else:
            raise AssertionError(f"{name} differs over {axis} without an error")


def check_unreached_parameters(folder: str) -> None:
    """After the first backward pass, exactly the layer that the model skips is named."""
    samples = make_samples(97)
    strategy, model, _, _, loader = make(f"{folder}/qwen3", samples, packed=False, **LAYOUTS["dp2-tp2"])
    model.config.num_hidden_layers = 2  # transformers runs layers[:num_hidden_layers]; the model has 3
    forward_backward(strategy, model, next(iter(loader)), sft_loss, train=True)
    expected = [name for name, _ in model.named_parameters() if name.startswith("model.layers.2.")]
    assert len(expected) == 11 and strategy.unreached_parameters(model) == expected
    with contextlib.redirect_stdout(io.StringIO()) as output:
        inspect_gradients(strategy, model, None)
    if strategy.is_rank_0():
        line = f"warning: no gradient reached 11 trainable parameters: {', '.join(expected)}\n"
        assert output.getvalue() == line, output.getvalue()


def check_save(folder: str) -> None:
    """A model trained on the (dp_replicate, fsdp, tp) mesh loads with transformers, bit for bit."""
    from transformers import AutoTokenizer

    strategy, model, optimizer, scheduler, loader = make(
        f"{folder}/gemma3", make_samples(97), packed=False, **LAYOUTS["hsdp2-tp2"]
    )
    forward_backward(strategy, model, next(iter(loader)), sft_loss, train=True)
    strategy.optimizer_step(optimizer, model, scheduler)
    strategy.save_model(model, AutoTokenizer.from_pretrained(f"{folder}/demo/model"), f"{folder}/saved")
    expected = full(strategy.iter_full_params(model))
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert type(loaded).__name__ == "Gemma3ForCausalLM"
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == expected.keys() and "lm_head.weight" not in expected
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


def check_gradient_checkpointing_and_bf16(folder: str) -> None:
    """Recomputation changes no number under tp. bf16 stays near fp32, with fp32 masters and gradients."""
    samples = make_samples(97)
    losses = {}
    for dtype, recompute in (("fp32", False), ("fp32", True), ("bf16", True)):
        strategy, model, _, _, loader = make(
            f"{folder}/qwen3", samples, packed=True, dtype=dtype, recompute=recompute, **LAYOUTS["dp2-tp2-sequence"]
        )
        sums, _ = forward_backward(strategy, model, next(iter(loader)), sft_loss, train=True)
        loss_sum = sums["loss"]
        losses[dtype, recompute] = loss_sum
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses["fp32", True] == losses["fp32", False]
    assert abs(losses["bf16", True] / losses["fp32", False] - 1) < 1e-2, losses


def check_chunked_loss(folder: str) -> None:
    """Losses from hidden states and a sharded head, by five rows, equal the plain loop. This includes tied weights."""
    samples, chunk_bytes, linear_nll = make_samples(97), token_losses.CHUNK_BYTES, linear_loss.linear_nll
    rows = []

    def counted(hidden, *rest):
        rows.append(len(hidden))
        return linear_nll(hidden, *rest)

    token_losses.CHUNK_BYTES, linear_loss.linear_nll = 5 * 97 * 4, counted
    try:
        for architecture, layout in (("qwen2", "hsdp2-dp2"), ("qwen2", "z0"), ("qwen2", "z3"), ("llama", "z1")):
            rows.clear()
            check(folder, architecture, layout, True, samples, plain_run(f"{folder}/{architecture}", samples))
            assert rows and max(rows) > 5
    finally:
        token_losses.CHUNK_BYTES, linear_loss.linear_nll = chunk_bytes, linear_nll


CHECKS = [
    check_vocab_parallel_loss,
    check_sentinel,
    check_unreached_parameters,
    check_save,
    check_gradient_checkpointing_and_bf16,
    check_chunked_loss,
]


def main(folder: str, runs: list[str]) -> None:
    """Run the exactness checks of `runs`, then all others. A run is ARCHITECTURE:LAYOUT:packed or :padded."""
    for architecture, names in itertools.groupby(runs, lambda name: name.split(":")[0]):
        samples = make_samples(AutoConfig.from_pretrained(f"{folder}/{architecture}").vocab_size)
        expected = plain_run(f"{folder}/{architecture}", samples)
        for name in names:
            _, layout, kind = name.split(":")
            check(folder, architecture, layout, kind == "packed", samples, expected)
    for special in CHECKS:
        special(folder)
        if dist.get_rank() == 0:
            print(f"ok {special.__name__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
    end_well()

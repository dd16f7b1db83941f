"""Checks of a strategy without the trainer. test_strategies.py runs `torchrun strategy_checks.py BACKEND DEMO`.

There is no command and no training loop, only a strategy, a model, a batch and a loss. Prints "ok NAME" per check.
Rank 0 writes the demo into the folder DEMO, and its model in fp16 into DEMO/fp16.
"""

import functools
import math
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainer.datasets.batches.packing import collate_padded
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import rank_0_alone
from trainer.entry import end_well
from trainer.errors import UserError
from trainer.methods.sft import sft_loss
from trainer.model_folders.model_folder import SafetensorsFolder, unwrapped
from trainer.model_folders.model_writer import save_safetensors_shards
from trainer.strategies.options import StrategyOptions
from trainer.training.loop import forward_backward

BACKEND = sys.argv[1]
DEMO = sys.argv[2]
STAGES = {"deepspeed": [0, 1, 2, 3], "fsdp2": [2, 3], "ddp": [None]}[BACKEND]


class Samples(list):
    """Rows that return a column for a name, like a datasets.Dataset."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)


def make_samples(num_samples: int = 9) -> Samples:
    """Samples of very different lengths, so that the two ranks get different numbers of loss tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = Samples()
    for number in range(num_samples):
        length = 4 + 5 * number
        ids = torch.randint(3, 290, (length,), generator=generator).tolist()
        mask = [0, 0, *[1] * (length - 2)]
        samples.append(
            {
                "input_ids": ids,
                "loss_mask": mask,
                "num_tokens": length,
                "num_loss_tokens": length - 2,
                "digest": f"{number:016x}",
            }
        )
    return samples


def start(stage: int, dtype: str = "fp32", **options):
    """The strategy of BACKEND. It has joined the process group."""
    if BACKEND == "deepspeed":
        from trainer.strategies.deepspeed import DeepspeedStrategy as Strategy
    elif BACKEND == "ddp":
        from ddp_strategy import DDPStrategy as Strategy
    else:
        from trainer.strategies.fsdp2 import FSDP2Strategy as Strategy
    strategy = Strategy(StrategyOptions(param_dtype=dtype, zero_stage=stage, **options))
    strategy.setup_distributed()
    return strategy


def write_models() -> None:
    """Write the demo, and its model in fp16."""
    make_demo(DEMO)
    AutoModelForCausalLM.from_pretrained(f"{DEMO}/model", dtype=torch.float16).save_pretrained(f"{DEMO}/fp16")


def make(stage: int, dtype: str = "fp32", folder: str = f"{DEMO}/model", **options):
    """(strategy, model, optimizer, scheduler, loader) of the demo model on random samples."""
    strategy = start(stage, dtype, **options)
    model = strategy.load_model(folder, AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    collate = functools.partial(collate_padded, pad_token_id=0)
    loader = strategy.setup_dataloader(make_samples(), collate, batch_size=9, micro_batch_size=2, shuffle=False)
    return strategy, model, optimizer, scheduler, loader


def first_batch(loader):
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    return next(iter(loader))


def full(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in tensors}


def check_masters_and_buffers(stage: int) -> None:
    """bf16: the masters are the checkpoint's fp32 or fp16 values, without rounding. RoPE tables stay fp32.

    Attention gets bf16. A frozen model of the same folder gives the same logits."""
    for folder in (f"{DEMO}/fp16", f"{DEMO}/model"):
        strategy, model, *_ = make(stage, "bf16", folder=folder)
        weights = SafetensorsFolder(folder)
        for name, tensor in full(strategy.iter_full_params(model)).items():
            assert torch.equal(tensor, weights.read(name).float()), f"{name} was rounded"
    dtypes = set()

    def noted(module, query, key, value, *args, **kwargs):
        dtypes.update((query.dtype, key.dtype, value.dtype))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("noted", noted)
    unwrapped(model).set_attn_implementation("noted")
    model(torch.arange(3, 20)[None])
    # the autocast of the DDP example leaves q and k of Qwen3 in fp32, behind their norms
    assert dtypes == {torch.bfloat16} or BACKEND == "ddp", dtypes
    unwrapped(model).set_attn_implementation("sdpa")
    expected = dict(AutoModelForCausalLM.from_pretrained(f"{DEMO}/model").named_buffers())
    frozen = strategy.prepare(strategy.load_model(f"{DEMO}/model", AutoModelForCausalLM).requires_grad_(False))
    assert {parameter.dtype for parameter in frozen.parameters()} == {torch.bfloat16} or BACKEND == "ddp"
    for module in (model, frozen):
        for name, buffer in unwrapped(module).named_buffers():
            assert buffer.dtype == expected[name].dtype and torch.equal(buffer.cpu(), expected[name]), name
    with torch.no_grad():
        logits, same = (module(torch.arange(3, 259)[None]).logits for module in (model, frozen))
    assert logits.equal(same)


def check_small_bf16_updates(stage: int) -> None:
    """bf16 with a rate far below bf16's resolution: without fp32 masters, weights would not move."""
    strategy, model, optimizer, scheduler, loader = make(stage, "bf16")
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    scheduler.base_lrs = [1e-6 for _ in scheduler.base_lrs]
    before = full(strategy.iter_full_params(model))
    for _ in range(3):
        forward_backward(strategy, model, first_batch(loader), sft_loss, train=True)
        strategy.optimizer_step(optimizer, model, scheduler)
    after = full(strategy.iter_full_params(model))
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    total = sum(tensor.numel() for tensor in before.values())
    # vocabulary rows that the samples never touch keep a zero gradient
    assert changed > 0.9 * total, f"only {changed} of {total} weights moved"


def check_not_finite(stage: int) -> None:
    """A step with a non-finite gradient on only one rank changes nothing on any rank. The next step trains."""
    strategy, model, optimizer, scheduler, loader = make(stage)

    def poisoned_loss(model, micro_batch):
        loss, count = sft_loss(model, micro_batch)
        return (loss * float("nan") if strategy.is_rank_0() else loss), count

    before = full(strategy.iter_full_params(model))
    forward_backward(strategy, model, first_batch(loader), poisoned_loss, train=True)
    assert not math.isfinite(strategy.optimizer_step(optimizer, model, scheduler))
    after = full(strategy.iter_full_params(model))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert scheduler.last_epoch == 0, "the schedule moved on a skipped step"
    forward_backward(strategy, model, first_batch(loader), sft_loss, train=True)
    assert math.isfinite(strategy.optimizer_step(optimizer, model, scheduler))
    trained = full(strategy.iter_full_params(model))
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    assert scheduler.last_epoch == 1


def check_ties_and_replicas(stage: int) -> None:
    """Tied embeddings are one parameter after training, and every rank holds the same full weights."""
    strategy, model, optimizer, scheduler, loader = make(stage)
    for _ in range(2):
        forward_backward(strategy, model, first_batch(loader), sft_loss, train=True)
        strategy.optimizer_step(optimizer, model, scheduler)
    module = unwrapped(model)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    weights = full(strategy.iter_full_params(model))
    assert "lm_head.weight" not in weights
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: tensor.double().sum().item() for name, tensor in weights.items()})
    assert all(sums == gathered[0] for sums in gathered)


def check_save(stage: int) -> None:
    """A folder saved in many shards by two ranks loads with transformers. It is that of one rank, bit for bit."""
    strategy, model, *_ = make(stage)
    from transformers import AutoTokenizer

    folder, tokenizer = f"{DEMO}-saved-{BACKEND}-{stage}", AutoTokenizer.from_pretrained(f"{DEMO}/model")
    strategy.save_model(model, tokenizer, folder, max_shard_bytes=100_000)
    expected = full(strategy.iter_full_params(model))
    files = {name: Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))}
    if strategy.is_rank_0():
        assert len([name for name in files if name.endswith(".safetensors")]) > 1
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(loaded).__name__ == "Qwen3ForCausalLM" and loaded.dtype == torch.float32
        parameters = dict(loaded.named_parameters())
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
        assert "chat_template.jinja" in files and loaded.generation_config.eos_token_id is not None
        os.makedirs(f"{folder}-alone", exist_ok=True)
        save_safetensors_shards(expected.items(), f"{folder}-alone", 100_000)
        for file in Path(f"{folder}-alone").iterdir():
            assert files[file.name] == file.read_bytes(), file.name
        assert {name for name in files if name.startswith("model")} == set(os.listdir(f"{folder}-alone"))
    check_save_with_a_full_disk(strategy, model, tokenizer, folder)
    assert {name: Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))} == files


def check_save_with_a_full_disk(strategy, model, tokenizer, folder: str) -> None:
    """If rank 1 cannot write its shards, all ranks say so, and the older folder stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # of the files that this process writes
    with pytest.raises(UserError, match=r"cannot be written: .*File too large.* \(on rank 1\)"):
        strategy.save_model(model, tokenizer, folder, max_shard_bytes=100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert not os.path.exists(folder + ".tmp")


def check_offload_and_gradient_checkpointing(stage: int) -> None:
    """--adam_offload and --gradient_checkpointing change no number."""
    plain = make(stage)
    loss = forward_backward(*plain[:2], first_batch(plain[4]), sft_loss, train=True)[0]["loss"]
    expected = full(plain[0].iter_full_grads(plain[1]))
    strategy, model, optimizer, scheduler, loader = make(stage, adam_offload=bool(stage))
    unwrapped(model).gradient_checkpointing_enable({"use_reentrant": False})
    other = forward_backward(strategy, model, first_batch(loader), sft_loss, train=True)[0]["loss"]
    assert other == loss
    if not (BACKEND == "deepspeed" and stage):  # its offloaded gradients are in the optimizer's own buffers
        for name, grad in full(strategy.iter_full_grads(model)).items():
            assert torch.allclose(grad, expected[name], rtol=1e-6, atol=1e-9), name
    plain[0].optimizer_step(*plain[2:0:-1], plain[3])
    strategy.optimizer_step(optimizer, model, scheduler)
    weights, others = full(plain[0].iter_full_params(plain[1])), full(strategy.iter_full_params(model))
    for name, tensor in weights.items():
        assert torch.allclose(tensor, others[name], rtol=1e-5, atol=1e-7), name


def check_offload(stage: int) -> None:
    """Offloaded tensors free their memory and come back bitwise the same. Training continues with no change."""
    runs, sizes = [], []
    for moves in (False, True):
        strategy, model, optimizer, scheduler, loader = make(stage)
        for _ in range(3):
            forward_backward(strategy, model, first_batch(loader), sft_loss, train=True)
            strategy.optimizer_step(optimizer, model, scheduler)
            if moves:
                states, weights = strategy.offload(optimizer=optimizer), strategy.offload(model=model)
                assert not any(storage.nbytes() for storage, _ in states + weights)
                sizes.append([sum(copy.nbytes() for _, copy in moved) for moved in (states, weights)])
                strategy.onload(states + weights)
                strategy.onload(strategy.offload(model=model, optimizer=optimizer))
        runs.append(full(strategy.iter_full_params(model)))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    whole, ranks = sum(tensor.nbytes for tensor in runs[0].values()), dist.get_world_size()
    if BACKEND == "ddp":  # every rank holds all weights, and they are in the mapped file
        assert min(states for states, _ in sizes) >= 2 * whole
        return
    parts = 1 if BACKEND == "deepspeed" and stage < 3 else ranks
    for states, weights in sizes:
        ranks = 1 if stage == 0 else ranks
        assert states >= 0.9 * 2 * whole / ranks and weights >= 0.9 * whole / parts, (sizes, whole)


def squared_surprise(model, micro_batch: dict) -> tuple:
    """A loss that no command has: the squared log-prob of each loss token, and a metric."""
    labels = micro_batch["labels"]
    keep = labels != -100
    logits = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]).logits
    log_probs = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0][keep]
    return (
        (log_probs**2).sum(),
        keep.sum(),
        {"surprise": -log_probs.sum(), "with_grad": keep.sum() * log_probs.requires_grad},
    )


def check_a_loss_of_the_caller(stage: int) -> None:
    """Forward only, forward and backward over micro-batches, and update give the numbers of one plain model."""
    strategy, model, optimizer, scheduler, loader = make(stage)
    plain = AutoModelForCausalLM.from_pretrained(f"{DEMO}/model", dtype=torch.float32)
    samples, total, surprise, count = make_samples(), 0.0, 0.0, 0
    for sample in list.__iter__(samples):
        micro_batch = collate_padded([sample], pad_token_id=0)
        loss, targets, metrics = squared_surprise(plain, micro_batch)
        total, surprise, count = total + loss, surprise + metrics["surprise"].item(), count + targets.item()
    (total / count).backward()
    before = full(strategy.iter_full_params(model))
    forward_only, num = forward_backward(strategy, model, first_batch(loader), squared_surprise, train=False)
    assert num == count and forward_only["with_grad"] == 0
    assert math.isclose(forward_only["loss"], total.item(), rel_tol=1e-5)
    assert math.isclose(forward_only["surprise"], surprise, rel_tol=1e-5)
    assert len(first_batch(loader).micro_batches) > 1
    sums, _ = forward_backward(strategy, model, first_batch(loader), squared_surprise, train=True)
    assert sums == {**forward_only, "with_grad": count}
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, grad in full(strategy.iter_full_grads(model)).items():
        assert (grad - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
    norm = torch.nn.utils.get_total_norm(expected.values()).item()
    assert math.isclose(strategy.optimizer_step(optimizer, model, scheduler), norm, rel_tol=1e-4)
    after = full(strategy.iter_full_params(model))
    assert all(not torch.equal(after[name], before[name]) for name in before)


CHECKS = [
    check_a_loss_of_the_caller,
    check_offload,
    check_masters_and_buffers,
    check_small_bf16_updates,
    check_not_finite,
    check_ties_and_replicas,
    check_save,
    check_offload_and_gradient_checkpointing,
]

if __name__ == "__main__":
    start(STAGES[0])
    rank_0_alone(write_models)
    for zero_stage in STAGES:
        for check in CHECKS:
            check(zero_stage)
            if int(os.environ["RANK"]) == 0:
                print(f"ok {check.__name__} stage {zero_stage}", flush=True)
    end_well()

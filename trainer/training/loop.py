"""The training loop that every method shares: forward and backward over a global batch, step, log, evaluate, save.

A method brings its loss function, a strategy brings the distribution. `loss_fn(model, micro_batch)` gives (sum, count), or
(sum, count, metrics) with sums by name over the same targets, of which the mean over the global batch is logged. A sum
named x_square beside x is logged as the standard deviation x_std; a sum named x_count is the denominator of x alone.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional, Union

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from trainer.errors import UserError
from trainer.metrics import MetricsLog, host_peak_memory_bytes, step_line
from trainer.training.checkpointing import Checkpoints, Progress
from trainer.training.signals import StopRequest


@dataclass(frozen=True)
class TwoPassLoss:
    """A loss of which every sample's value needs a mean over the whole global batch, through which no gradient goes.

    `first_pass(model, micro_batch)` gives (sum, count) of that mean; `loss(model, micro_batch, mean=...)` the loss.
    """

    first_pass: Callable[[torch.nn.Module, dict], tuple]
    loss: Callable[..., tuple]


LossFunction = Union[Callable[[torch.nn.Module, dict], tuple], TwoPassLoss]

# dense bf16 peak FLOP/s by a part of the device's name, from the makers' data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def forward_backward(strategy, model, batch, loss_fn: LossFunction, optimizer=None) -> tuple[dict[str, float], int]:
    """Run every micro-batch of this rank's part of a global batch: forward, and backward too where there is an `optimizer`.

    Returns the sums of losses ("loss") and of the method's metrics, and the count, over the global batch (one all-reduce
    over dp x sp, one more for a TwoPassLoss). The mean, and every gradient, has the global count as its only denominator.
    """
    if isinstance(loss_fn, TwoPassLoss):
        loss_fn = functools.partial(loss_fn.loss, mean=first_pass_mean(strategy, model, batch, loss_fn.first_pass))
    names, totals = ["loss"], 0.0
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        with torch.set_grad_enabled(optimizer is not None):
            loss_sum, count, *metrics = loss_fn(model, micro_batch)
        sums = {"loss": loss_sum, **(metrics[0] if metrics else {})}
        names = list(sums)
        totals = totals + torch.stack([value.detach().double() for value in (count, *sums.values())])
        if optimizer is not None:
            is_last = number == len(batch.micro_batches)
            strategy.backward(loss_sum, model, optimizer, num_targets=batch.num_targets, is_last=is_last)
    num_targets, *values = strategy.all_reduce(totals).tolist()
    if num_targets != batch.num_targets:
        raise RuntimeError(f"the loss counted {num_targets} targets, the global batch has {batch.num_targets}")
    return dict(zip(names, values)), batch.num_targets


@torch.no_grad()
def first_pass_mean(strategy, model, batch, first_pass: Callable) -> float:
    """The mean over the global batch of what `first_pass` sums up (one all-reduce over dp x sp)."""
    parts = [torch.stack(first_pass(model, micro_batch)).double() for micro_batch in batch.micro_batches]
    total, count = strategy.all_reduce(torch.stack(parts).sum(0)).tolist()
    return total / count


def mean_metrics(sums: dict[str, float], count: int) -> dict[str, float]:
    """Means of sums over `count` targets, or of x over x_count, unless that is 0; of x and x_square, x and x_std."""
    own = {name: sums.get(f"{name}_count", count) for name in sums if not name.endswith("_count")}
    means = {name: sums[name] / denominator for name, denominator in own.items() if denominator}
    for name in [name for name in means if f"{name}_square" in means]:
        means[f"{name}_std"] = math.sqrt(max(means.pop(f"{name}_square") - means[name] ** 2, 0.0))
    return means


def evaluate(strategy, model, loader, loss_fn: LossFunction) -> dict[str, float]:
    """The mean loss and metrics over all targets of the evaluation set."""
    model.eval()
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    sums: dict[str, float] = {}
    num_targets = 0
    for batch in loader:
        batch_sums, count = forward_backward(strategy, model, batch, loss_fn)
        sums = {name: sums.get(name, 0.0) + value for name, value in batch_sums.items()}
        num_targets += count
    model.train()
    return mean_metrics(sums, num_targets)


def endless(loader) -> Iterator:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def train_step(
    strategy, model, optimizer, scheduler, batch, loss_fn: LossFunction, progress: Progress, inspect=None, started=None
) -> dict:
    """One optimizer step on a global batch; moves `progress` on and returns the row of metrics.jsonl.

    `inspect` is called between backward and the step, while gradients are whole. The step's time counts from `started`
    (time.perf_counter), before which the batch was not yet read, or from now.
    """
    started = started or time.perf_counter()
    sums, num_targets = forward_backward(strategy, model, batch, loss_fn, optimizer)
    means = mean_metrics(sums, num_targets)
    if inspect:
        inspect()
    lr = scheduler.get_last_lr()[0]
    grad_norm = strategy.optimizer_step(optimizer, model, scheduler)
    progress.step += 1
    progress.tokens_seen += batch.num_tokens
    row = step_row(strategy, batch, progress, means, num_targets, grad_norm, lr, time.perf_counter() - started)
    progress.skipped_in_a_row = 0 if math.isfinite(grad_norm) else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row:
        progress.skipped_steps += 1
        row["skipped"] = True
    return row


def step_row(
    strategy, batch, progress: Progress, means: dict, num_targets: int, grad_norm: float, lr: float, step_time: float
) -> dict:
    """What metrics.jsonl holds of a step, whatever the method; its own means at the end."""
    return {
        "step": progress.step,
        "epoch": batch.epoch,
        "loss": means.pop("loss"),
        "grad_norm": grad_norm,
        "lr": lr,
        "tokens": num_targets,
        "tokens_seen": progress.tokens_seen,
        "batch_hash": batch.batch_hash,
        "step_time": step_time,
        "tokens_per_second": batch.num_tokens / step_time,
        "peak_memory_bytes": _peak_memory(strategy.device),
        **means,
    }


def train(
    strategy,
    model,
    optimizer,
    scheduler,
    loader,
    loss_fn: LossFunction,
    *,
    total_steps: int,
    metrics: Optional[MetricsLog],
    checkpoints: Checkpoints,
    progress: Progress,
    flops_per_token: float = 0.0,
    eval_loader=None,
    eval_steps: Optional[int] = None,
    logging_steps: int = 1,
    max_skipped_steps: int = 10,
    check_replicas_every: Optional[int] = None,
    parity_dump: Optional[str] = None,
) -> None:
    """Run the optimizer steps up to `total_steps`. `metrics` is rank 0's log, None on every other rank.

    Raises Interrupted, after a checkpoint, where a signal asked for it.
    """
    model.train()
    bar = tqdm(total=total_steps, initial=progress.step, disable=None if strategy.is_rank_0() else True, unit="step")
    batches = endless(loader)
    with StopRequest() as stop:
        while progress.step < total_steps:
            started = time.perf_counter()
            batch = next(batches)
            inspect = None
            if progress.step == 0:
                inspect = functools.partial(inspect_gradients, strategy, model, parity_dump)
            row = train_step(strategy, model, optimizer, scheduler, batch, loss_fn, progress, inspect, started)
            row["mfu"] = _mfu(strategy.device, flops_per_token * row["tokens_per_second"])
            step = progress.step
            bar.update()
            if metrics:
                metrics.row(**row)
            if step % logging_steps == 0 and strategy.is_rank_0():
                tqdm.write(step_line(row, total_steps))
            if progress.skipped_in_a_row >= max_skipped_steps:
                raise UserError(
                    f"step {step}",
                    f"loss or gradient norm not finite in {max_skipped_steps} steps in a row; samples {batch.sample_ids}",
                )
            if check_replicas_every and step % check_replicas_every == 0:
                strategy.check_replicas(model)
            eval_metrics = None
            if eval_loader and (step == total_steps or (eval_steps and step % eval_steps == 0)):
                eval_metrics = _evaluate_and_log(strategy, model, eval_loader, loss_fn, metrics, step, total_steps)
            checkpoints.after_step(progress, eval_metrics, stop.received)
        checkpoints.finish()
    bar.close()
    if parity_dump:
        dump(strategy, parity_dump, "weights_final", strategy.iter_full_params, model)


def warn_of_unreached_parameters(strategy, model) -> None:
    """A trainable parameter that the first step's loss does not depend on is most often a mistake."""
    names = strategy.unreached_parameters(model)
    if names:
        strategy.print(f"warning: no gradient reached {len(names)} trainable parameters: {', '.join(names)}")


def inspect_gradients(strategy, model, parity_dump: Optional[str]) -> None:
    """What is looked at once, between the first backward and the first step."""
    warn_of_unreached_parameters(strategy, model)
    if parity_dump:
        dump(strategy, parity_dump, "grads_step1", strategy.iter_full_grads, model)


def _evaluate_and_log(strategy, model, loader, loss_fn, metrics, step: int, total_steps: int) -> dict[str, float]:
    started = time.perf_counter()
    values = {f"eval_{name}": value for name, value in evaluate(strategy, model, loader, loss_fn).items()}
    if metrics:
        metrics.row(step, **values, eval_time=time.perf_counter() - started)
        shown = " | ".join(f"{name} {value:.9g}" for name, value in values.items())
        tqdm.write(f"eval {step}/{total_steps} | {shown}")
    return values


def dump(strategy, folder: str, name: str, iter_full, model) -> None:
    """Write full tensors for a parity check. Rank 0 holds all of them in host memory: meant for small models."""
    full = {key: tensor.float().cpu().clone() for key, tensor in iter_full(model)}
    if strategy.is_rank_0():
        os.makedirs(folder, exist_ok=True)
        save_file(full, os.path.join(folder, f"{name}.safetensors"))


def _mfu(device: torch.device, flops_per_second: float) -> Optional[float]:
    """Share of the peak FLOP/s of all ranks' devices; None where the peak is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return flops_per_second / (peak * torch.distributed.get_world_size()) if peak else None


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host_peak_memory_bytes()

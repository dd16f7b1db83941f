"""The training loop that every method shares: forward and backward over a global batch, step, log, evaluate, save.

A method brings its loss function. A strategy (strategies/fsdp2.py, strategies/deepspeed.py) distributes it.
`loss_fn(model, micro_batch)` returns (sum, count) or (sum, count, metrics). Metrics are MetricSums, or tensors that are
sums over the same targets. Their means over the global batch are logged.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError
from trainer.metrics import MetricsLog, MetricSum, counted, host_peak_memory_bytes, mfu, step_line
from trainer.terminal import fitted
from trainer.training.checkpointing import Checkpoints, Progress
from trainer.training.live_bar import LiveBar
from trainer.training.stop_request import StopRequest

IF_NOT_FINITE = "Try a smaller --learning_rate, or --param_dtype fp32, and look at those samples."
MEMORY_EVERY = 20  # steps between two rows with the memory of every rank


@dataclass(frozen=True)
class TwoPassLoss:
    """A loss that needs, for each sample, sums over the whole global batch. They have no gradient.

    `first_pass(model, micro_batch)` returns sums (n,). `loss(model, micro_batch, sums=..., num_targets=...)` gets their
    totals and the number of targets of the batch.
    """

    first_pass: Callable[[torch.nn.Module, dict], torch.Tensor]
    loss: Callable[..., tuple]


LossFunction = Union[Callable[[torch.nn.Module, dict], tuple], TwoPassLoss]


@dataclass(frozen=True)
class LoopOptions:
    """How long a run is, and what happens between its steps."""

    total_steps: int
    logging_steps: int = 1
    eval_steps: Optional[int] = None  # evaluate every so many steps, in addition to the end
    max_skipped_steps: int = 10
    check_replicas_every: Optional[int] = None
    parity_dump: Optional[str] = None

    def eval_is_due(self, step: int, num_steps: int = 1) -> bool:
        """Whether an evaluation is due after the last `num_steps` up to `step`."""
        return step >= self.total_steps or bool(self.eval_steps and step % self.eval_steps < num_steps)


def _nothing(step: int) -> None:
    """The hook of a caller who needs none."""


@dataclass(frozen=True)
class LoopHooks:
    """What a caller adds to every step of `train`. Each hook runs on all ranks and gets the step, counted from 1."""

    before_step: Callable[[int], None] = _nothing  # the batch is read; no micro-batch has run
    after_backward: Callable[[int], None] = _nothing  # gradients are complete, and no weight has changed


# --- one global batch


def forward_backward(strategy, model, batch, loss_fn: LossFunction, train: bool) -> tuple[dict, int]:
    """Run every micro-batch of this rank's part of a global batch: forward, and with `train` also backward.

    Returns the sums over the global batch, and its count. The sums are "loss" and the method's metrics, as floats or
    MetricSums of floats (one all-reduce over dp x sp, one more for a TwoPassLoss). The global count is the only
    denominator of the loss and of every gradient. Whole numbers and fractions are added up apart: so numbers on the grid
    of --exact (exact_sums.LOSS_GRID) have an exact sum, of any size.
    """
    if isinstance(loss_fn, TwoPassLoss):
        sums = first_pass_sums(strategy, model, batch, loss_fn.first_pass)
        loss_fn = functools.partial(loss_fn.loss, sums=sums, num_targets=batch.num_targets)
    kinds, totals = {}, 0.0
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        with torch.set_grad_enabled(train):
            loss_sum, count, *metrics = loss_fn(model, micro_batch)
        kinds = _as_metric_sums({"loss": loss_sum, **(metrics[0] if metrics else {})})
        parts = [count, *(part for kind in kinds.values() for part in kind.parts())]
        numbers = torch.stack([part.detach().double() for part in parts])
        whole = numbers.floor()
        totals = totals + torch.stack([whole, (numbers - whole).nan_to_num(0.0)])  # inf - inf is NaN: `whole` has it
        if train:
            is_last = number == len(batch.micro_batches)
            strategy.backward(loss_sum, model, num_targets=max(batch.num_targets, 1), is_last=is_last)
    num_targets, *numbers = strategy.all_reduce(totals).sum(0).tolist()
    if num_targets != batch.num_targets:
        raise RuntimeError(
            f"the loss counted {counted(num_targets, 'target')}, but the global batch has {batch.num_targets}"
        )
    return _with_numbers(kinds, numbers), batch.num_targets


def _as_metric_sums(values: dict) -> dict[str, MetricSum]:
    return {name: value if isinstance(value, MetricSum) else MetricSum(value) for name, value in values.items()}


def _with_numbers(kinds: dict[str, MetricSum], numbers: list[float]) -> dict:
    """The sums with these numbers, in order. A sum without its own count is a plain float."""
    sums, given = {}, iter(numbers)
    for name, kind in kinds.items():
        found = kind.with_parts([next(given) for _ in kind.parts()])
        sums[name] = found.total if len(found.parts()) == 1 else found
    return sums


@torch.no_grad()
def first_pass_sums(strategy, model, batch, first_pass: Callable) -> torch.Tensor:
    """The sums of `first_pass` over the global batch, fp64 (one all-reduce over dp x sp)."""
    parts = [first_pass(model, micro_batch).double() for micro_batch in batch.micro_batches]
    return strategy.all_reduce(torch.stack(parts).sum(0))


def mean_metrics(sums: dict, count: int) -> dict[str, float]:
    """Means of the sums that `forward_backward` returns, over `count` targets or over their own count."""
    found = (metric.means(name, max(count, 1)) for name, metric in _as_metric_sums(sums).items())
    return {name: mean for means in found for name, mean in means.items()}


def evaluate(strategy, model, loader, loss_fn: LossFunction) -> dict[str, float]:
    """The mean loss and metrics over all targets of the evaluation set."""
    model.eval()
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    sums: dict = {}
    num_targets = 0
    for batch in loader:
        batch_sums, count = forward_backward(strategy, model, batch, loss_fn, train=False)
        sums = {name: sums[name] + value if name in sums else value for name, value in batch_sums.items()}
        num_targets += count
    model.train()
    return mean_metrics(sums, num_targets)


# --- one step


def train_step(
    strategy, model, optimizer, scheduler, batch, loss_fn: LossFunction, progress: Progress, inspect=None, started=None
) -> dict:
    """Do one optimizer step on a global batch. Updates `progress` and returns the row of metrics.jsonl.

    `inspect` is called between backward and the step, while gradients are complete. The step's time counts from
    `started` (time.perf_counter), before the batch was read. Without `started`, it counts from now.
    """
    started = started or time.perf_counter()
    sums, num_targets = forward_backward(strategy, model, batch, loss_fn, train=True)
    means = mean_metrics(sums, num_targets)
    if inspect:
        inspect()
    lr = scheduler.get_last_lr()[0]
    grad_norm = strategy.optimizer_step(optimizer, model, scheduler)
    row = step_row(strategy, batch, progress, means, num_targets, grad_norm, lr, started)
    progress.skipped_in_a_row = 0 if math.isfinite(grad_norm) else progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row:
        progress.skipped_steps += 1
        row["skipped"] = True
    return row


def step_row(
    strategy, batch, progress: Progress, means: dict, num_targets: int, grad_norm: float, lr: float, started: float
) -> dict:
    """Count the step in `progress`. Returns its row of metrics.jsonl, with the method's own means at the end."""
    progress.step += 1
    progress.tokens_seen += batch.num_tokens
    step_time = time.perf_counter() - started
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


def inspect_gradients(strategy, model, parity_dump: Optional[str]) -> None:
    """Name parameters without a gradient, and dump gradients on request, between the first backward and the first step.

    It is usually a mistake if the first step's loss does not depend on a trainable parameter.
    """
    names = strategy.unreached_parameters(model)
    if names:
        strategy.print(f"warning: no gradient reached {counted(len(names), 'trainable parameter')}: {', '.join(names)}")
    if parity_dump:
        dump(strategy, parity_dump, "grads_step1", strategy.iter_full_grads, model)


def dump(strategy, folder: str, name: str, iter_full: Callable, model) -> None:
    """Write full tensors for a parity check (collective). Rank 0 holds all of them, so use it for small models."""
    full = {key: tensor.float().cpu().clone() for key, tensor in iter_full(model)}
    if strategy.is_rank_0():
        os.makedirs(folder, exist_ok=True)
        save_file(full, os.path.join(folder, f"{name}.safetensors"))


# --- the run


class StepLog:
    """What follows every step of any method: the log row, the readable line, and the checks that can end the run."""

    def __init__(self, strategy, metrics: Optional[MetricsLog], options: LoopOptions, progress: Progress):
        """`metrics` is rank 0's log. It is None on every other rank."""
        self.strategy, self.metrics, self.options, self.progress = strategy, metrics, options, progress
        self.num_steps, self.has_trained = 0, False  # of this process
        self.bar = LiveBar(options.total_steps, progress.step, is_shown=strategy.is_rank_0())

    def after_step(self, model, row: dict, batch, note: str = "") -> None:
        """Log the row. `note` is added at the end of the readable line.

        Raises:
            UserError: too many steps in a row were not finite, or replicas differ.
        """
        options, step = self.options, row["step"]
        self.num_steps += 1
        self.has_trained |= bool(row["grad_norm"] and row["lr"])
        self.bar.update()
        if step == 1 or step % MEMORY_EVERY == 0:
            row["peak_memory_per_rank"] = gather_objects(row["peak_memory_bytes"])
        if self.metrics:
            self.metrics.row(**row)
        if step % options.logging_steps == 0 and self.strategy.is_rank_0():
            print(fitted(step_line(row, options.total_steps) + note), flush=True)
        if self.progress.skipped_in_a_row >= options.max_skipped_steps:
            found = f"loss or gradient norm not finite in {counted(options.max_skipped_steps, 'step')} in a row"
            shown = ", ".join(map(str, batch.sample_ids[:20])) + ", ..." * (len(batch.sample_ids) > 20)
            raise UserError(f"step {step}", f"{found}; samples [{shown}]")
        if options.check_replicas_every and step % options.check_replicas_every == 0:
            self.strategy.check_replicas(model)

    def end(self) -> None:
        """Raise UserError as `check_applied`. Say so if no step of this process could change a weight."""
        check_applied(self.progress)
        if self.num_steps and not self.has_trained:
            self.strategy.print(
                f"WARNING: {counted(self.num_steps, 'step')} had no gradient or no learning rate, so this run has trained nothing"
            )

    def evaluation(self, values: dict[str, float], started: float, digits: int = 9) -> None:
        """Log the values of an evaluation that began at `started`. Raises UserError if one is not finite."""
        if self.metrics:
            step = self.progress.step
            self.metrics.row(step, **values, eval_time=time.perf_counter() - started)
            shown = (f"{name} {value:.{digits}g}" for name, value in values.items() if name.startswith("eval_"))
            print(fitted(f"eval {step}/{self.options.total_steps} | {' | '.join(shown)}"), flush=True)
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        broken = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if broken:
            found = f"the evaluation gives {broken[0]}, so no model is saved"
            raise UserError(f"step {self.progress.step}", found, instead=IF_NOT_FINITE)


def check_applied(progress: Progress) -> None:
    """Raise UserError at the end of a run that trained nothing, or whose last steps broke what the first ones trained."""
    last, applied = progress.skipped_in_a_row, progress.step - progress.skipped_steps
    if last >= applied and last:
        found = f"loss or gradient norm not finite in the last {last} of {counted(progress.step, 'step')}, so no model is saved"
        raise UserError(f"step {progress.step}", found, instead=IF_NOT_FINITE)


def endless(loader) -> Iterator:
    """Batches of one epoch after the other, without end."""
    while True:
        yield from loader


def train(
    strategy,
    model,
    optimizer,
    scheduler,
    loader,
    loss_fn: LossFunction,
    options: LoopOptions,
    *,
    metrics: Optional[MetricsLog],
    checkpoints: Checkpoints,
    progress: Progress,
    flops_per_token: float = 0.0,
    eval_loader=None,
    hooks: LoopHooks = LoopHooks(),
) -> None:
    """Run the optimizer steps up to `options.total_steps`, or as long as the patience of early stopping lasts. `metrics` is rank 0's log, and None on every other rank.

    Raises Interrupted after a signal. It saves a checkpoint first.
    """

    def inspect() -> None:
        if progress.step == 0:
            inspect_gradients(strategy, model, options.parity_dump)
        hooks.after_backward(progress.step + 1)

    model.train()
    log, batches = StepLog(strategy, metrics, options, progress), endless(loader)
    with StopRequest() as stop, log.bar:
        while progress.step < options.total_steps and not checkpoints.policy.has_lost_patience(progress):
            started = time.perf_counter()
            batch = next(batches)
            hooks.before_step(progress.step + 1)
            row = train_step(strategy, model, optimizer, scheduler, batch, loss_fn, progress, inspect, started)
            row["mfu"] = None  # on CPU, or a GPU whose peak is unknown
            if strategy.device.type == "cuda":
                gpu, num_gpus = torch.cuda.get_device_name(strategy.device), dist.get_world_size()
                row["mfu"] = mfu(gpu, num_gpus, flops_per_token * row["tokens_per_second"])
            log.after_step(model, row, batch)
            eval_metrics = None
            if eval_loader and options.eval_is_due(progress.step):
                started = time.perf_counter()
                found = evaluate(strategy, model, eval_loader, loss_fn)
                eval_metrics = {f"eval_{name}": value for name, value in found.items()}
                log.evaluation(eval_metrics, started)
            checkpoints.after_step(progress, eval_metrics, stop.received)
        checkpoints.end(progress)
    log.end()
    if options.parity_dump:
        dump(strategy, options.parity_dump, "weights_final", strategy.iter_full_params, model)


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else host_peak_memory_bytes()

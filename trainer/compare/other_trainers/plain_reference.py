"""Replay another trainer's run with the plain loop: same rows, same order, same configuration, one sample at a time.

If the curves differ, the replay is repeated with known mistakes, one at a time. A mistake is reported if the plain loop
gives their curve with it.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, get_scheduler, set_seed

from trainer.compare.other_trainers.their_config import training_arguments
from trainer.compare.runs.logs import Run, Step
from trainer.compare.runs.parity import Comparison, signed_rel
from trainer.compare.runs.plain_loop import load_plain_model, plain_step
from trainer.datasets.files.loading import load_rows
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.models.model_loading import load_fault, resolve_model_folder

MicroBatches = list[list[int]]  # the row numbers of each micro-batch of one step
MORE_STEPS = 2  # logged steps after the first difference, which a mistake must also explain


@dataclass(frozen=True)
class Job:
    """All that the plain loop needs for another trainer's steps."""

    model: str
    samples: list[dict]  # input_ids and loss_mask
    arguments: Any  # TrainingArguments
    num_ranks: int
    steps: list[MicroBatches]
    total_steps: int
    device: str = "cpu"


@dataclass(frozen=True)
class Mistake:
    """A known fault: weights of the samples, targets, order of the data, or clipping."""

    name: str
    weights: Callable[[list[list[dict]], int], list[float]] | None = None  # (samples by micro-batch, ranks)
    mask: Callable[[dict], dict] | None = None
    in_file_order: bool = False
    clips: bool = True


# --- the job


def make_job(
    data: str, model: str, values: dict, num_ranks: int, sample_ids: str | None, num_steps: int, device: str = "cpu"
) -> Job:
    """`values` is a configuration of the HF Trainer. `sample_ids` is a file with the row numbers of each step."""
    model, samples = resolve_model_folder(model, "--model"), read_samples(data)
    if num_steps < 1:
        raise UserError("--logs", f"its last step is {num_steps}", "steps from 1 on")
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(values, folder)
        per_epoch, steps = hf_order(arguments, samples, num_ranks, num_steps)
    if sample_ids:
        steps = read_sample_ids(sample_ids, len(samples), arguments.per_device_train_batch_size)[:num_steps]
    total = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * per_epoch)
    if len(steps) < num_steps:
        raise UserError(
            "--data", f"gives {counted(len(steps), 'step')}, but the log has {num_steps}", "the data of the run"
        )
    return Job(model, samples, arguments, num_ranks, steps, total, device)


def read_samples(path: str) -> list[dict]:
    """The tokenized rows of a file: input_ids, and labels (-100: no loss) or masks. Without both, all tokens count."""
    samples = []
    for number, row in enumerate(load_rows(path, flag="--data", split="train"), start=1):
        ids, labels = row.get("input_ids"), row.get("labels")
        if ids is None:
            allowed = "tokenized rows, as trainer.train_dataset.to_json(FILE) writes them"
            raise UserError("--data", f"row {number} has no input_ids, but {', '.join(row)}", allowed)
        if not _are_token_ids(ids):
            raise UserError("--data", f"row {number}: input_ids are no list of token numbers", "tokenized rows")
        masks = [row[name] for name in ("completion_mask", "assistant_masks", "loss_mask") if row.get(name)]
        masks += [[label != -100 for label in labels]] if labels else []
        if any(not isinstance(one, list) or len(one) != len(ids) for one in masks):
            raise UserError(
                "--data", f"row {number}: labels and masks do not have the {counted(len(ids), 'place')} of input_ids"
            )
        mask = [int(all(bits)) for bits in zip(*masks, strict=True)] if masks else [1] * len(ids)
        samples.append({"input_ids": ids, "loss_mask": [0, *mask[1:]]})
    return samples


def _are_token_ids(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(token) is int and token >= 0 for token in ids)


def open_model(job: Job) -> torch.nn.Module:
    """The plain model of a job. Raises UserError for a broken folder, an unknown device or unknown tokens."""
    try:
        model = load_plain_model(job.model, "cpu")
    except Exception as error:  # transformers reports broken folders by many types
        raise load_fault(job.model, AutoModelForCausalLM, False, "--model", error) from None
    size, largest = model.get_input_embeddings().num_embeddings, max(max(one["input_ids"]) for one in job.samples)
    if largest >= size:
        raise UserError(
            "--data", f"token {largest}, but the model has {counted(size, 'token')}", "rows of this model's tokenizer"
        )
    try:
        return model.to(job.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError("--device", f"{job.device}: {str(error).splitlines()[0]}", "cpu, cuda") from None


def hf_order(arguments, samples: list[dict], num_ranks: int, num_steps: int) -> tuple[int, list[MicroBatches]]:
    """(steps per epoch, row numbers of each step), from the HF Trainer's own loader.

    Several ranks take the batches of one sampler in turn. So the micro-batches of a step are consecutive.
    """
    set_seed(arguments.seed)
    rows = Dataset.from_dict({"row": range(len(samples)), "input_ids": [sample["input_ids"] for sample in samples]})
    trainer = Trainer(
        torch.nn.Linear(1, 1), arguments, data_collator=lambda rows: [row["row"] for row in rows], train_dataset=rows
    )
    loader, steps, epoch = trainer.get_train_dataloader(), [], 0
    per_step = arguments.gradient_accumulation_steps * num_ranks
    while len(steps) < num_steps:
        loader.set_epoch(epoch)
        batches = list(loader)
        if not batches:
            found = f"gives no batch of {counted(arguments.per_device_train_batch_size, 'row')}"
            raise UserError("--data", found, "the data of the run")
        steps += [batches[i : i + per_step] for i in range(0, len(batches), per_step)]
        epoch += 1
    return math.ceil(len(loader) / per_step), steps[:num_steps]


def read_sample_ids(path: str, num_rows: int, micro_batch_size: int) -> list[MicroBatches]:
    """JSON lines, one per step: the row numbers of the step, or a list of them for each micro-batch."""
    steps = []
    try:
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            ids = json.loads(line)
            if not all(isinstance(one, list) for one in ids):
                ids = [ids[i : i + micro_batch_size] for i in range(0, len(ids), micro_batch_size)]
            if not ids or not all(type(row) is int for batch in ids for row in batch):
                raise UserError("--sample_ids", f"line {number} is no list of row numbers", "such as [0, 1, 2]")
            if not all(0 <= row < num_rows for batch in ids for row in batch):
                raise UserError("--sample_ids", f"line {number} names a row beyond the {num_rows} of --data")
            steps.append(ids)
    except (OSError, ValueError, TypeError, IndexError, KeyError) as error:
        raise UserError("--sample_ids", f"{path}: {error}", "a JSON list of row numbers per line") from None
    return steps


# --- the replay


def replay(job: Job, num_steps: int, mistake: Mistake | None = None) -> dict[int, Step]:
    """Run the plain loop. Returns loss, gradient norm and learning rate of each step."""
    arguments, model = job.arguments, open_model(job)
    optimizer = torch.optim.AdamW(
        _groups(model, arguments),
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
    )
    warmup, options = arguments.get_warmup_steps(job.total_steps), arguments.lr_scheduler_kwargs or {}
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, warmup, job.total_steps, options)
    found, in_order = {}, iter(range(10**12))
    for step, batches in enumerate(job.steps[:num_steps], start=1):
        if mistake and mistake.in_file_order:
            batches = [[next(in_order) % len(job.samples) for _ in batch] for batch in batches]
        samples = [[job.samples[row] for row in batch] for batch in batches]
        if mistake and mistake.mask:
            samples = [[mistake.mask(sample) for sample in batch] for batch in samples]
        weights = mistake.weights(samples, job.num_ranks) if mistake and mistake.weights else None
        loss, norm = plain_step(model, [sample for batch in samples for sample in batch], weights)
        found[step] = Step(loss, norm, lr=scheduler.get_last_lr()[0])
        if arguments.max_grad_norm and (mistake is None or mistake.clips):
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        scheduler.step()
    return found


def _groups(model, arguments) -> list[dict]:
    """Parameter groups with weight decay where the HF Trainer has it."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": arguments.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def as_logged(found: dict[int, Step], logged: list[int]) -> dict[int, Step]:
    """The steps in a log. A line has the mean loss since the line before, and the norm of its last step."""
    rows, before = {}, 0
    for step in logged:
        losses = [found[number].loss for number in range(before + 1, step + 1)]
        rows[step] = Step(sum(losses) / len(losses), found[step].grad_norm, lr=found[step].lr)
        before = step
    return rows


def plain_run(job: Job, theirs: Run, mistake: Mistake | None = None, last: int | None = None) -> Run:
    """The plain loop's curve at the steps of their log, up to step `last`."""
    logged = [step for step in theirs.steps if last is None or step <= last]
    return Run("plain", as_logged(replay(job, logged[-1], mistake), logged))


# --- where they differ, and why


def first_difference(comparison: Comparison, rounding: float) -> tuple[int, str, float, float] | None:
    """(step, "loss" or "grad norm", relative difference, allowed) of the first step beyond the thresholds, or None.

    If the log has rounded losses, the rounding is allowed too.
    """
    for row in comparison.rows:
        allowed = comparison.thresholds.loss + rounding / max(abs(row.reference_loss), 1e-12)
        if not abs(row.rel_loss) <= allowed:
            return row.step, "loss", row.rel_loss, allowed
        limit = comparison.thresholds.grad_norm
        if limit is not None and row.rel_grad_norm is not None and not abs(row.rel_grad_norm) <= limit:
            return row.step, "grad norm", row.rel_grad_norm, limit
    return None


def _count(sample: dict) -> int:
    return sum(sample["loss_mask"][1:])


def _mean_of_micro_batches(samples: list[list[dict]], _ranks: int) -> list[float]:
    counts = [sum(map(_count, batch)) for batch in samples]
    return [1 / (max(count, 1) * len(samples)) for batch, count in zip(samples, counts, strict=True) for _ in batch]


def _mean_of_samples(samples: list[list[dict]], _ranks: int) -> list[float]:
    number = sum(map(len, samples))
    return [1 / (max(_count(sample), 1) * number) for batch in samples for sample in batch]


def _mean_of_ranks(samples: list[list[dict]], ranks: int) -> list[float]:
    counts = [sum(sum(map(_count, batch)) for batch in samples[rank::ranks]) for rank in range(ranks)]
    return [1 / (max(counts[i % ranks], 1) * ranks) for i, batch in enumerate(samples) for _ in batch]


def _sum_of_micro_batches(samples: list[list[dict]], ranks: int) -> list[float]:
    return [weight * len(samples) for weight in _mean_of_micro_batches(samples, ranks)]


def _accumulation_twice(samples: list[list[dict]], _ranks: int) -> list[float]:
    count = max(sum(_count(sample) for batch in samples for sample in batch), 1)
    return [1 / (count * len(samples)) for batch in samples for _ in batch]


def _with_prompt(sample: dict) -> dict:
    return {**sample, "loss_mask": [0] + [1] * (len(sample["loss_mask"]) - 1)}


def _without_last(sample: dict) -> dict:
    return {**sample, "loss_mask": [*sample["loss_mask"][:-1], 0]}


MISTAKES = (
    Mistake("a mean of the means of micro-batches, instead of the mean over all tokens", _mean_of_micro_batches),
    Mistake("a mean of the means of samples, instead of the mean over all tokens", _mean_of_samples),
    Mistake("a mean of the means of ranks, instead of the mean over all tokens", _mean_of_ranks),
    Mistake("the sum of the means of micro-batches, not divided by their number", _sum_of_micro_batches),
    Mistake("the mean over all tokens, divided by the number of micro-batches again", _accumulation_twice),
    Mistake("a loss on the prompt's tokens too", mask=_with_prompt),
    Mistake("no loss on the last token of each sample", mask=_without_last),
    Mistake("rows in the order of the file, instead of a shuffled one", in_file_order=True),
    Mistake("no clipping of the gradient", clips=False),
)


def explain(job: Job, theirs: Run, comparison: Comparison, difference: tuple) -> list[str]:
    """Names of mistakes that give the plain loop their loss and gradient norm, until just after the first difference."""
    logged = list(theirs.steps)
    last = logged[min(logged.index(difference[0]) + MORE_STEPS, len(logged) - 1)]
    names = []
    for mistake in MISTAKES:
        run = plain_run(job, theirs, mistake, last)
        if all(_agrees(run.steps[step], theirs.steps[step], comparison, theirs.rounding) for step in run.steps):
            names.append(mistake.name)
    return names


def _agrees(mine: Step, other: Step, comparison: Comparison, rounding: float) -> bool:
    limit, allowed = comparison.thresholds.grad_norm, comparison.thresholds.loss + rounding / max(abs(mine.loss), 1e-12)
    if not abs(signed_rel(other.loss, mine.loss)) <= allowed:
        return False
    if limit is None or other.grad_norm is None:
        return True
    return abs(signed_rel(other.grad_norm, mine.grad_norm)) <= limit


def different_rates(mine: Run, theirs: Run) -> str | None:
    """The first step with another learning rate, or None."""
    for step, row in mine.steps.items():
        other = theirs.steps[step].lr
        if other is not None and abs(other - row.lr) > 1e-6 * max(abs(row.lr), abs(other)):
            return f"learning rate at step {step}: {other:.6g}, the configuration gives {row.lr:.6g}"
    return None


def difference_text(job: Job, mine: Run, theirs: Run, comparison: Comparison) -> str:
    """Lines that say from which step and by how much their run differs from the plain loop, and if known, why."""
    lines = [f"{theirs.name}: losses are rounded to {theirs.rounding:g}"] if theirs.rounding else []
    difference = first_difference(comparison, theirs.rounding)
    if difference is None:
        return "\n".join(
            [*lines, f"{theirs.name} agrees with the plain loop at all {counted(len(comparison.rows), 'logged step')}"]
        )
    step, what, rel, allowed = difference
    lines.append(
        f"{theirs.name} differs from the plain loop at step {step}: its {what} is {rel:+.3g} away (allowed {allowed:.2g})"
    )
    if rate := different_rates(mine, theirs):
        lines.append(f"  {rate}")
    names = explain(job, theirs, comparison, difference)
    lines += [f"  the plain loop has the same curve with this mistake: {name}" for name in names]
    if not names and what == "grad norm":
        lines.append("  the loss agrees and the gradient does not: --audit names the parameter")
    elif not names:
        lines.append("  none of the known mistakes gives their curve")
    return "\n".join(lines)

"""Audit another trainer per parameter: one of its steps, through an adapter, against the plain loop.

An adapter is a class with two methods, `load` and `step`. docs/other_trainers.md shows how to write one.
"""

import importlib
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from trainer.compare.other_trainers.plain_reference import Job, open_model
from trainer.compare.other_trainers.their_config import training_arguments
from trainer.compare.runs.plain_loop import load_plain_model, plain_step
from trainer.errors import UserError
from trainer.models.model_loading import load_tokenizer
from trainer.reports.dump_files import NOISE

LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4
SHOWN = 8


class Adapter(Protocol):
    """What an audit needs from a trainer. All ranks may take part. Only the values of rank 0 are compared."""

    def load(self, config: dict[str, Any]) -> Any:
        """Build the model in fp32, without dropout, and return it. `config`: model (a folder), training_args (a dict)."""

    def step(self, batch: list[list[dict]]) -> tuple[float, dict[str, torch.Tensor]]:
        """Forward and backward over one global batch, without an optimizer step.

        `batch` holds micro-batches of samples with input_ids and loss_mask (1: the token is a target). Returns the
        loss, and full gradients by Hugging Face name, before clipping.
        """


class HFTrainerAdapter:
    """transformers.Trainer, with its own collator, its own count of tokens and its own training_step."""

    trainer_class = "transformers:Trainer"
    config_class = "transformers:TrainingArguments"

    def load(self, config: dict[str, Any]) -> torch.nn.Module:
        tokenizer, model = load_tokenizer(config["model"]), load_plain_model(config["model"], "cpu")
        self.folder = tempfile.TemporaryDirectory()
        rows = Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})  # a Trainer refuses to start without data
        options = {"data_collator": DataCollatorForSeq2Seq(tokenizer)} if self.trainer_class.startswith("trans") else {}
        self.trainer = _named(self.trainer_class)(
            model=model, args=self._arguments(config), train_dataset=rows, processing_class=tokenizer, **options
        )
        return model

    def _arguments(self, config: dict[str, Any]):
        base = training_arguments(config["training_args"], self.folder.name).to_dict()
        kind = _named(self.config_class)
        known = {name: base[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "seed")}
        options = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
        return kind(self.folder.name, remove_unused_columns=False, **options, **known)

    def step(self, batch: list[list[dict]]) -> tuple[float, dict[str, torch.Tensor]]:
        trainer, model = self.trainer, self.trainer.model
        model.zero_grad()
        inputs = [trainer.data_collator([_labelled(sample) for sample in samples]) for samples in batch]
        trainer.current_gradient_accumulation_steps = len(inputs)
        count = trainer._get_num_items_in_batch(inputs, torch.device("cpu"))
        loss = sum(trainer.training_step(model, dict(one), count).item() for one in inputs)
        return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class TRLAdapter(HFTrainerAdapter):
    """trl.SFTTrainer."""

    trainer_class = "trl:SFTTrainer"
    config_class = "trl:SFTConfig"


BUILT_IN = {"hf": HFTrainerAdapter, "trl": TRLAdapter}


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _labelled(sample: dict) -> dict:
    labels = [token if mask else -100 for token, mask in zip(sample["input_ids"], sample["loss_mask"], strict=True)]
    return {"input_ids": list(sample["input_ids"]), "labels": labels}


def open_adapter(name: str) -> Adapter:
    """hf, trl, or MODULE:CLASS. Raises UserError if there is no such class."""
    sys.path.insert(0, os.getcwd())
    try:
        adapter = BUILT_IN[name]() if name in BUILT_IN else _named(name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError("--audit", f"{name}: {error}", f"{', '.join(BUILT_IN)}, or MODULE:CLASS") from None
    if not all(callable(getattr(adapter, method, None)) for method in ("load", "step")):
        raise UserError("--audit", f"{name} has no load and step", "a class as docs/other_trainers.md describes it")
    return adapter


@dataclass(frozen=True)
class Audit:
    """The result of one step: losses, and by name the relative difference and the ratio of the gradient."""

    loss: float
    plain_loss: float
    differences: dict[str, float]  # ||theirs - plain|| / ||plain||, in the order of the model
    ratios: dict[str, float]  # <theirs, plain> / <plain, plain>
    noise: list[str]  # gradients that are only rounding
    missing: list[str]

    @property
    def relative_loss(self) -> float:
        if not self.plain_loss:
            return 0.0 if self.loss == self.plain_loss else math.inf
        return abs(self.loss / self.plain_loss - 1)

    @property
    def wrong(self) -> list[str]:
        return [name for name, value in self.differences.items() if not value <= GRADIENT_LIMIT]

    @property
    def passed(self) -> bool:
        return self.relative_loss <= LOSS_LIMIT and not self.wrong and not self.missing


def audit(adapter: Adapter, job: Job, values: dict) -> Audit:
    """One step of the adapter's trainer against the plain loop, on the first batch of `job`."""
    batch = [[job.samples[row] for row in rows] for rows in job.steps[0]]
    model = open_model(job)
    plain_loss, norm = plain_step(model, [sample for samples in batch for sample in samples])
    adapter.load({"model": job.model, "training_args": values})
    loss, gradients = adapter.step(batch)
    differences, ratios, noise, missing = {}, {}, [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name not in gradients:
            missing.append(name)
            continue
        mine, theirs = parameter.grad.double().cpu(), gradients[name].double().cpu()
        if max(mine.norm(), theirs.norm()) <= NOISE * norm:
            noise.append(name)
            continue
        differences[name] = ((theirs - mine).norm() / mine.norm()).item()
        ratios[name] = ((theirs * mine).sum() / mine.square().sum()).item()
    return Audit(float(loss), plain_loss, differences, ratios, noise, missing)


def audit_text(name: str, found: Audit) -> str:
    """The result in lines: losses, the wrong gradients in the order of the model, and a guess."""
    lines = [f"loss: {found.loss:.9g}, the plain loop has {found.plain_loss:.9g}: {found.relative_loss:.2e} away"]
    lines.append(f"gradients: {len(found.differences)} compared, {len(found.wrong)} beyond {GRADIENT_LIMIT:g}")
    lines += [
        f"  {name}: {found.differences[name]:.3g} away, ratio {found.ratios[name]:.5g}" for name in found.wrong[:SHOWN]
    ]
    if len(found.wrong) > SHOWN:
        lines.append(f"  and {len(found.wrong) - SHOWN} more")
    lines += [f"  no gradient of {name}" for name in found.missing[:SHOWN]]
    ratios = [found.ratios[name] for name in found.wrong]
    if found.wrong and max(ratios) - min(ratios) < 1e-3 * abs(ratios[0]) and _is_scale(found):
        lines.append(
            f"  these gradients are {ratios[0]:.5g} times the gradients of the plain loop: a factor, counted twice or missing"
        )
    if found.noise:
        lines.append(f"not judged, only rounding: {', '.join(found.noise[:SHOWN])}")
    return "\n".join([*lines, f"{'PASS' if found.passed else 'FAIL'} {name}"])


def _is_scale(found: Audit) -> bool:
    """Whether one factor explains each wrong gradient completely."""
    return all(abs(found.differences[n] - abs(found.ratios[n] - 1)) < 1e-2 * found.differences[n] for n in found.wrong)

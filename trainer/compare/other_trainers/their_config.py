"""The configuration of somebody else's run: the HF Trainer's training_args.bin, or a YAML or JSON file with its names.

training_args.bin is a pickle. It is read here without any of its code: each object becomes a record of its values.
"""

import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from trainer.errors import UserError, one_line

# fields of transformers.TrainingArguments that decide what a step computes
FIELDS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "max_grad_norm", "max_steps", "num_train_epochs", "seed", "data_seed", "optim", "train_sampling_strategy",
    "dataloader_drop_last", "logging_steps",
)  # fmt: skip
# the smallest and the largest value of those that are numbers
NUMBERS = {
    "per_device_train_batch_size": (1, math.inf), "gradient_accumulation_steps": (1, math.inf),
    "learning_rate": (0, math.inf), "warmup_steps": (0, math.inf), "warmup_ratio": (0, 1), "adam_beta1": (0, 0.999999999),
    "adam_beta2": (0, 0.999999999), "adam_epsilon": (0, math.inf), "weight_decay": (0, math.inf),
    "max_grad_norm": (0, math.inf), "max_steps": (-1, math.inf), "num_train_epochs": (0, math.inf),
    "seed": (0, 2**32 - 1), "data_seed": (0, 2**32 - 1), "logging_steps": (0, math.inf),
}  # fmt: skip
# unsupported in the plain loop: (field, values that switch it off)
OFF = (
    ("label_smoothing_factor", (None, 0)),
    ("packing", (None, False)),
    ("loss_type", (None, "nll")),
    ("neftune_noise_alpha", (None,)),
    ("use_lora", (None, False)),
)


class _Record:
    """Replaces any class of a pickle, and keeps the values that the pickle gives to it."""

    def __new__(cls, *values, **_named) -> "_Record":  # some objects of a pickle get no call of __init__
        record = super().__new__(cls)
        record.values = values
        return record

    def __init__(self, *_values, **_named):
        pass

    def __setstate__(self, state) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})

    def __call__(self, *values, **_named) -> "_Record":
        return _Record(*values)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _Record

    def persistent_load(self, _identity) -> None:
        return None


def read_their_config(path: str) -> dict[str, Any]:
    """The values by the names of TrainingArguments. Raises UserError if the file cannot be read."""
    allowed = "training_args.bin of the HF Trainer, or a YAML or JSON file with the names of TrainingArguments"
    try:
        values = _read_pickle(Path(path)) if path.endswith(".bin") else yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError("--training_args", f"{path} cannot be read: {error.strerror}", allowed) from None
    except Exception as error:  # of many types: a broken zip, pickle or YAML
        found = f"{path} cannot be read: {one_line(error)}"
        raise UserError("--training_args", found, allowed) from None
    if not isinstance(values, dict):
        raise UserError("--training_args", f"{path} holds no names and values", allowed)
    for name, off in OFF:
        if values.get(name) not in off:
            raise UserError("--training_args", f"{name} {values[name]}, which the plain loop does not do", "without it")
    return values


def _read_pickle(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as file:
            record = _Reader(file).load()
    return {key: _plain(value) for key, value in vars(record).items() if key != "values"}


def _plain(value: Any) -> Any:
    """An enumeration is pickled as its class with one value. Python 3.11.2 writes getattr, the class and the name."""
    if isinstance(value, _Record):
        if len(value.values) == 2 and isinstance(value.values[1], str):
            return value.values[1].lower()  # names of transformers are their values in capitals
        return value.values[0] if len(value.values) == 1 else None
    return value


def _checked(name: str, value: Any) -> Any:
    """A value of the right kind. YAML reads 2e-5 as a text."""
    if name == "lr_scheduler_kwargs" and not isinstance(value, dict | str):
        raise UserError("--training_args", f"{name} {value!r}", "names and values")
    if name not in NUMBERS:
        return value
    least, most = NUMBERS[name]
    try:
        number = value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most or isinstance(value, bool):
        raise UserError("--training_args", f"{name} {value!r}", f"a number from {least:g} to {most:g}")
    return number


def training_arguments(values: dict[str, Any], output_dir: str):
    """The transformers.TrainingArguments of this configuration, for the CPU. Raises UserError for wrong values."""
    kept = {name: _checked(name, values[name]) for name in FIELDS if values.get(name) is not None}
    if kept.pop("warmup_ratio", None):  # older versions had both, and warmup_steps won
        kept.setdefault("warmup_steps", 0)
        kept["warmup_steps"] = kept["warmup_steps"] or _checked("warmup_ratio", values["warmup_ratio"])
    try:
        arguments = TrainingArguments(output_dir, use_cpu=True, report_to="none", remove_unused_columns=False, **kept)
    except (TypeError, ValueError) as error:
        raise UserError("--training_args", one_line(error), "values of TrainingArguments") from None
    if str(arguments.optim.value) not in ("adamw_torch", "adamw_torch_fused"):
        raise UserError("--training_args", f"optim {arguments.optim.value}", "adamw_torch, adamw_torch_fused")
    return arguments


def dtype_of(values: dict[str, Any]) -> str:
    """bf16, fp16 or fp32, from the flags of the HF Trainer."""
    return "bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "fp32"

"""Write metrics.jsonl, the record of a run, and copy it to trackers such as wandb. Also format the line of a step."""

import json
import math
import os
import re
import resource
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from trainer.errors import Interrupted, UserError
from trainer.limits import lines_of
from trainer.mirrors import Mirrors

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"  # the samples of train_ppo
# what readers of rows count on, by name; a row of a step has all of OF_STEP
KINDS = {
    "event": str, "step": int, "total_steps": int, "config": dict, "mesh": (dict, type(None)), "versions": (dict, type(None)),
    "data": (dict, type(None)), "loss": (float, int), "grad_norm": (float, int), "batch_hash": str,
}  # fmt: skip
OF_STEP = ("step", "loss", "grad_norm", "batch_hash")
MOST_WAITING = 100  # rows that wait for a disk with space, until the run saves and ends
# dense bf16 peak FLOP/s by words of the device's name, from the makers' data sheets; the first entry that fits counts
PEAK_FLOPS = (
    ("GB200", 2500e12), ("B200", 2250e12), ("GH200", 989e12), ("H200", 989e12), ("H800", 989e12),
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H20", 148e12), ("A100", 312e12), ("A800", 312e12),
    ("L40S", 362e12), ("L4", 121e12), ("A10G", 70e12), ("A10", 125e12), ("RTX 5090", 209.5e12), ("RTX 4090", 165e12),
)  # fmt: skip


class MetricsLog:
    """Appends rows to `<output_dir>/metrics.jsonl`. Only rank 0 makes one.

    On a full disk, rows wait in memory, and each next row tries again to write them. `waiting` has their lines. A
    checkpoint keeps them; see `Checkpoints.save`.
    """

    def __init__(
        self,
        output_dir: str,
        *,
        trackers: Iterable[str] = (),
        project: str = "",
        config: Optional[dict] = None,
        run_ids: Optional[dict[str, Optional[str]]] = None,
        run_name: Optional[str] = None,
        needs_whole: bool = False,
    ):
        """`trackers` are names in `mirrors.TRACKERS`, and `run_ids` their ids in the run that goes on.

        `needs_whole`: a damaged row in the file is a UserError, since a certificate cannot be written of it.
        """
        self._path = os.path.join(output_dir, METRICS_FILE)
        self.waiting: list[str] = []
        self.fault = ""  # why rows wait
        try:
            _remove_torn_line(self._path)
            _tell_damaged_line(self._path, needs_whole)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._size = os.fstat(self._file).st_size  # of the whole rows
        except OSError as error:
            raise UserError(self._path, f"cannot be opened: {error.strerror}", "a file that can be written") from None
        self._mirrors = Mirrors(output_dir, trackers, project, config, run_ids, run_name)
        self.run_ids = self._mirrors.run_ids

    @property
    def is_stuck(self) -> bool:
        """Whether so many rows wait that the run should save and end."""
        return len(self.waiting) > MOST_WAITING

    def event(self, name: str, **fields) -> None:
        """Write a row that is not a step: start, resume, changed, stop or end."""
        self._append({"event": name, **fields})

    def row(self, step: int, **values) -> None:
        """Write the row of a step or of an evaluation."""
        self._append({"step": step, **values})
        self._mirrors.row(step, values)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        """Show rows of texts and numbers in the trackers. metrics.jsonl gets no texts."""
        self._mirrors.table(name, step, rows)

    def add_missing(self, lines: list[str]) -> None:
        """Write the lines of a checkpoint, in which they waited, that the file does not have."""
        if lines:
            with open(self._path, encoding="utf-8", errors="replace") as file:
                there = set(file)
            self.waiting += [line for line in lines if line not in there]
            self._write_waiting()

    def _append(self, row: dict) -> None:
        self.waiting.append(json.dumps(row) + "\n")
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write all lines that wait, or none of them."""
        data = "".join(self.waiting).encode()
        try:
            if os.fstat(self._file).st_size > self._size:  # a part of a row, written as the disk became full
                os.ftruncate(self._file, self._size)
            done = 0
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            if not self.fault:
                print(f"{self._path} cannot be written: {error.strerror}; its rows wait for the next try", flush=True)
            self.fault = error.strerror or str(error)
            return
        if self.fault:
            print(f"{self._path} is written again, with all rows that waited", flush=True)
        self._size, self.fault = self._size + len(data), ""
        self.waiting.clear()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind, error, _) -> None:
        if isinstance(error, (Interrupted, UserError)):
            self.event("stop", reason=str(error))
        self.close()
        if kind is None and self.waiting:
            found = (
                f"{counted(len(self.waiting), 'row')} cannot be written: {self.fault}; the newest checkpoint has them"
            )
            raise UserError(self._path, found, instead="Free disk space, and resume with --load_checkpoint.")

    def close(self) -> None:
        self._write_waiting()
        os.close(self._file)
        self._mirrors.close()


@dataclass(frozen=True)
class MetricSum:
    """A metric of a loss function: a sum, and the count that divides it for the mean over the global batch.

    `total` is the sum of the values. `count` is their number; None means the count of the loss. `squares` is the sum of
    the squared values; with it, the standard deviation is also reported. All are tensors of one element, or floats.
    """

    total: Any
    count: Any = None
    squares: Any = None

    def parts(self) -> list:
        """The numbers that add up over micro-batches and ranks."""
        return [value for value in (self.total, self.count, self.squares) if value is not None]

    def with_parts(self, numbers: list) -> "MetricSum":
        """Return the same kind of metric with other numbers, in the order of `parts`."""
        given = iter(numbers)
        return MetricSum(*(None if v is None else next(given) for v in (self.total, self.count, self.squares)))

    def __add__(self, other: "MetricSum") -> "MetricSum":
        return self.with_parts([a + b for a, b in zip(self.parts(), other.parts())])

    def means(self, name: str, default_count: float) -> dict[str, float]:
        """Return {name: mean}, and with `squares` also {name_std: standard deviation}. Empty if the count is 0."""
        count = default_count if self.count is None else self.count
        if not count:
            return {}
        mean = self.total / count
        if self.squares is None:
            return {name: mean}
        return {name: mean, f"{name}_std": math.sqrt(max(self.squares / count - mean**2, 0.0))}


class Rows:
    """Keeps the rows of steps in memory, instead of a log."""

    def __init__(self):
        self.found: list[dict] = []

    def row(self, step: int, **values) -> None:
        self.found.append({"step": step, **values})


def _remove_torn_line(path: str) -> None:
    """Remove a last line without a line end. A run that was killed while it wrote leaves such a line."""
    end = 0
    for line in lines_of(path) if os.path.exists(path) else ():
        end += len(line) if line.endswith(b"\n") else 0
    if os.path.exists(path):
        os.truncate(path, end)


def _tell_damaged_line(path: str, is_error: bool) -> None:
    """Say which line of an existing file is no row, or raise UserError."""
    for number, line in enumerate(lines_of(path) if os.path.exists(path) else (), start=1):
        try:
            row_of(line)
            continue
        except (ValueError, RecursionError) as fault:
            found = "is damaged: it is no row of a run" + (f" ({fault})" if isinstance(fault, OddRow) else "")
        if is_error:
            raise UserError(f"{path} line {number}", found, "the file as it was written, or no --certificate")
        print(f"{path} line {number} {found}. The run goes on; programs that read this file may refuse it", flush=True)


class OddRow(ValueError):
    """A row has a value that no run writes. The text says which."""


def row_of(line: bytes | str) -> dict:
    """A row of metrics.jsonl. Raises ValueError or RecursionError for no JSON, and OddRow for values no run writes."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise OddRow(f"{str(row)[:40]!r} is no object")
    wanted = OF_STEP if "event" not in row and "loss" in row else ()
    for name in (name for name in KINDS if name in row or name in wanted):
        value, kinds = row.get(name), KINDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and name != "event"):
            raise OddRow(f"{name} is {str(value)[:40]!r}")
        if isinstance(value, int) and not 0 <= value < 1 << 53:
            raise OddRow(f"{name} is {str(value)[:40]}")
    return row


def host_peak_memory_bytes() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def shown_number(count: float) -> str:
    """12345 as "12.35 thousand"."""
    for unit, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.3g}"


def counted(number: int, one: str, many: str = "") -> str:
    """1 GPU, 2 GPUs; `many` is for words that take more than an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


class Counting(string.Formatter):
    """`str.format` with nouns: "{rows:row}, {n:row holds|rows hold}" gives "1 row, 2 rows hold"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        one, _, many = format_spec.partition("|")
        return counted(value, one, many) if one[:2].isalpha() else super().format_field(value, format_spec)


in_words = Counting().format


def step_line(row: dict, total_steps: int) -> str:
    """The readable line of a training step."""
    skipped = " | skipped: not finite" if row.get("skipped") else ""
    return (
        f"step {row['step']}/{total_steps} | epoch {row['epoch']} | loss {row['loss']:.9g} | "
        f"grad_norm {row['grad_norm']:.9g} | lr {row['lr']:.3e} | loss tokens {row['tokens']} | "
        f"{row['step_time']:.2f} s | {row['tokens_per_second']:.0f} tok/s{skipped}"
    )


def full_size(parameter) -> int:
    """The number of weights of a parameter that ZeRO 3 has partitioned (`numel()` is 0), or bitsandbytes has packed."""
    if "ds_numel" in vars(parameter):
        return parameter.ds_numel
    state = vars(parameter).get("quant_state")
    return state.shape.numel() if state is not None else parameter.numel()


def flops_per_token(config, num_params: float, mean_length: float) -> float:
    """Training FLOPs per token of a transformers `config`: 6 N + 6 L d s for causal attention.

    N: parameters, L: layers, d: heads x head_dim, s: mean length in tokens. The formula is from PaLM (Chowdhery et al.
    2022, appendix B). Causal attention needs half of its second term.
    """
    text = config.get_text_config()
    widths = [
        layer.num_attention_heads * (getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads)
        for layer in layer_configs(text)
        if hasattr(layer, "num_attention_heads")  # Mamba has none
    ]
    return 6 * num_params + 6 * sum(widths) * mean_length


def peak_flops(device_name: str) -> Optional[float]:
    """Dense bf16 FLOP/s of a GPU; None if unknown. "NVIDIA H100 80GB HBM3" is an H100 with SXM."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    return next((flops for name, flops in PEAK_FLOPS if set(name.split()) <= words), None)


def mfu(device_name: str, num_gpus: int, flops_per_second: float) -> Optional[float]:
    """Share of the peak FLOP/s of `num_gpus` GPUs; None if the peak is unknown."""
    peak = peak_flops(device_name)
    return flops_per_second / (peak * num_gpus) if peak else None


def layer_configs(text) -> list:
    """The config of each layer. Some models, such as Gemma 4, have layers with heads of their own size."""
    if vars(text).get("_heterogeneity_spec") is None:
        return [text] * text.num_hidden_layers
    return [text.per_layer_config[number] for number in range(text.num_hidden_layers)]

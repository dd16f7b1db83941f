"""metrics.jsonl, the one record of a run; wandb and TensorBoard mirror it, and one readable line goes to the terminal."""

import json
import os
import resource
from typing import Optional

from trainer.errors import UserError

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows to `<output_dir>/metrics.jsonl`; made on rank 0 only."""

    def __init__(
        self,
        output_dir: str,
        *,
        use_tensorboard: bool = False,
        wandb_project: Optional[str] = None,
        config: Optional[dict] = None,
        wandb_run_id: Optional[str] = None,
    ):
        _remove_torn_line(os.path.join(output_dir, METRICS_FILE))
        self._file = open(os.path.join(output_dir, METRICS_FILE), "a")  # noqa: SIM115 (open as long as the log)
        self._tensorboard = self._wandb = None
        if use_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(os.path.join(output_dir, "tensorboard"))
        if wandb_project:
            import wandb

            try:
                self._wandb = wandb.init(
                    project=wandb_project, dir=output_dir, config=config, id=wandb_run_id, resume="allow"
                )
            except wandb.Error as error:
                allowed = "wandb login, WANDB_API_KEY, or WANDB_MODE=offline"
                raise UserError("--use_wandb", str(error).splitlines()[0], allowed) from None
        self.wandb_run_id: Optional[str] = self._wandb.id if self._wandb else None

    def event(self, name: str, **fields) -> None:
        """A row that is no step: start, resume, end."""
        self._append({"event": name, **fields})

    def row(self, step: int, **values) -> None:
        """A step's or an evaluation's row."""
        self._append({"step": step, **values})
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        if self._tensorboard:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb:
            self._wandb.log({"step": step, **numbers}, step=step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        """Rows of texts and numbers, to look at in the mirrors; metrics.jsonl holds no texts."""
        if self._tensorboard:
            self._tensorboard.add_text(name, _markdown_table(rows), step)
        if self._wandb:
            import wandb

            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._wandb.log({name: table}, step=step)

    def _append(self, row: dict) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


class Rows:
    """The rows of steps in memory, instead of a log."""

    def __init__(self):
        self.found: list[dict] = []

    def row(self, step: int, **values) -> None:
        self.found.append({"step": step, **values})


def _markdown_table(rows: list[dict]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[" ".join(str(value).replace("|", "\\|").split()) for value in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _remove_torn_line(path: str) -> None:
    """Cut off a last line without its end: what a run that was killed while it wrote leaves behind."""
    if os.path.exists(path):
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def host_peak_memory_bytes() -> int:
    """The largest resident size that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step_line(row: dict, total_steps: int) -> str:
    """The readable line of a training step."""
    return (
        f"step {row['step']}/{total_steps} | epoch {row['epoch']} | loss {row['loss']:.9g} | "
        f"grad_norm {row['grad_norm']:.9g} | lr {row['lr']:.3e} | tokens {row['tokens']} | "
        f"{row['step_time']:.2f} s | {row['tokens_per_second']:.0f} tok/s"
    )

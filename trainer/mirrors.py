"""Copies of a run's metrics in wandb and TensorBoard."""

import os
from typing import Optional

from trainer.errors import UserError

SHARED_NAMES = {
    "lr": "learning_rate",
    "reward_accuracy": "rewards/accuracies",
    "chosen_rewards": "rewards/chosen",
    "rejected_rewards": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "chosen_logps": "logps/chosen",
    "rejected_logps": "logps/rejected",
}


class Mirrors:
    """Copies for --use_tensorboard and --use_wandb. Only rank 0 makes one."""

    def __init__(
        self,
        output_dir: str,
        use_tensorboard: bool,
        wandb_project: Optional[str],
        config: Optional[dict],
        wandb_run_id: Optional[str],
        run_name: Optional[str] = None,
    ):
        self._tensorboard = self._wandb = None
        if use_tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an optional package

            self._tensorboard = SummaryWriter(os.path.join(output_dir, "tensorboard"))
        if wandb_project:
            import wandb  # an optional package

            options = {"dir": output_dir, "config": config, "id": wandb_run_id, "resume": "allow"}
            options["name"] = run_name or os.path.basename(os.path.realpath(output_dir))
            try:
                self._wandb = wandb.init(project=wandb_project, **options)
            except wandb.Error as error:
                allowed = "wandb login, WANDB_API_KEY, or WANDB_MODE=offline"
                raise UserError("--use_wandb", str(error).splitlines()[0], allowed) from None
        self.wandb_run_id: Optional[str] = self._wandb.id if self._wandb else None

    def row(self, step: int, values: dict) -> None:
        """Copy the numbers of a step or of an evaluation."""
        numbers = {shared_name(key): value for key, value in values.items() if isinstance(value, (int, float))}
        if self._tensorboard:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb:
            self._wandb.log({"train/global_step": step, **numbers}, step=step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        """Show rows of texts and numbers."""
        if self._tensorboard:
            self._tensorboard.add_text(name, _markdown_table(rows), step)
        if self._wandb:
            import wandb  # an optional package

            table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._wandb.log({name: table}, step=step)

    def close(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def shared_name(key: str) -> str:
    """The name of a metric where curves of several trainers lie over each other: those of HF Trainer and TRL."""
    if key.startswith("eval_"):
        key = key.removeprefix("eval_")
        return f"eval/{SHARED_NAMES.get(key, key)}"
    return f"train/{SHARED_NAMES.get(key, key)}"


def _markdown_table(rows: list[dict]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[" ".join(str(value).replace("|", "\\|").split()) for value in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)

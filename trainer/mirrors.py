"""Copies of a run's metrics in the trackers that --report_to names. Each one is an optional package, and a small class here."""

import importlib
import inspect
import os
import re
import secrets
import string
from collections.abc import Callable, Iterable
from typing import Any, Optional

from trainer.errors import UserError, one_line

SHARED_NAMES = {
    "lr": "learning_rate",
    "reward_accuracy": "rewards/accuracies",
    "chosen_rewards": "rewards/chosen",
    "rejected_rewards": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "chosen_logps": "logps/chosen",
    "rejected_logps": "logps/rejected",
    "response_length": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "groups_equal": "frac_reward_zero_std",
    "clip_fraction": "clip_ratio/region_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "clip_fraction_high": "clip_ratio/high_mean",
    "rollout_logprob_diff": "sampling/sampling_logp_difference/mean",
    "rollout_logprob_diff_max": "sampling/sampling_logp_difference/max",
}
OF_REWARD = re.compile(r"^reward_(?!std$|p\d+$)(.+)")  # the mean of one function of --reward_func, as TRL has it
CURES = {"wandb": "wandb login, WANDB_API_KEY, or WANDB_MODE=offline"}
WITHOUT_KEY = ("offline", "disabled", "dryrun")  # modes of wandb
MOST_PARAMS, LONGEST_PARAM = 100, 500  # of one call of mlflow.log_params, and of a value in every version


def check_wandb() -> None:
    """Raise UserError if Weights & Biases will look for a key and find none, or a malformed one.

    Older versions cannot look without asking a person. They say so when they start.
    """
    wandb = importlib.import_module("wandb")
    if wandb.setup().settings.mode in WITHOUT_KEY or "prompt" not in inspect.signature(wandb.login).parameters:
        return
    try:
        found = "" if wandb.login(prompt=False, verify=False) else "it has no key"
    except Exception as error:  # of any type, as at its start
        found = one_line(error)
    if found:
        raise UserError("--report_to wandb", found, CURES["wandb"])


class TensorBoard:
    """A folder for TensorBoard. Like each class here, it has `run_id`, with which a resumed run goes on; None: none is needed."""

    def __init__(self, output_dir: str, project: str, name: str, config: dict, run_id: Optional[str]):
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        self._writer, self.run_id = tensorboard.SummaryWriter(os.path.join(output_dir, "tensorboard")), None

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        self._writer.add_text(name, _markdown_table(rows), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases."""

    def __init__(self, output_dir: str, project: str, name: str, config: dict, run_id: Optional[str]):
        self._wandb = importlib.import_module("wandb")
        options = {"dir": output_dir, "config": config, "id": run_id, "resume": "allow", "name": name}
        self._run = self._wandb.init(project=project, **options)
        self.run_id = self._run.id
        if self._run.disabled:
            print("WARNING: --report_to wandb: WANDB_MODE=disabled, so nothing is logged there", flush=True)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({"train/global_step": step, **numbers}, step=step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio. A run goes on by its name, so each run has one of its own."""

    def __init__(self, output_dir: str, project: str, name: str, config: dict, run_id: Optional[str]):
        self._trackio, self.run_id = importlib.import_module("trackio"), run_id or f"{name}-{secrets.token_hex(3)}"
        self._trackio.init(project=project, name=self.run_id, config=config, resume="allow")

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._trackio.log(numbers, step=step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        frame = importlib.import_module("pandas").DataFrame(rows)
        self._trackio.log({name: self._trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._trackio.finish()


class MLflow:
    """MLflow. The project is an experiment."""

    def __init__(self, output_dir: str, project: str, name: str, config: dict, run_id: Optional[str]):
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(project)
        self.run_id = self._mlflow.start_run(run_id=run_id, run_name=name).info.run_id
        params = [(key, str(value)[:LONGEST_PARAM]) for key, value in config.items()]
        for first in range(0, 0 if run_id else len(params), MOST_PARAMS):  # a run that goes on has them, for good
            self._mlflow.log_params(dict(params[first : first + MOST_PARAMS]))

    def log(self, step: int, numbers: dict[str, float]) -> None:
        named = {re.sub(r"/+", "/", re.sub(r"[^/\w.\- :]", "_", name)): value for name, value in numbers.items()}
        self._mlflow.log_metrics(named, step=step)  # it refuses other characters, which names of groups may have

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        self._mlflow.log_text(_markdown_table(rows), f"{name}_{step}.md")

    def close(self) -> None:
        self._mlflow.end_run()


class SwanLab:
    """SwanLab. Its ids are 21 characters."""

    def __init__(self, output_dir: str, project: str, name: str, config: dict, run_id: Optional[str]):
        self._swanlab = importlib.import_module("swanlab")
        letters = string.ascii_lowercase + string.digits
        self.run_id = run_id or "".join(secrets.choice(letters) for _ in range(21))
        options = {"config": config, "logdir": os.path.join(output_dir, "swanlog"), "id": self.run_id}
        self._swanlab.init(project=project, experiment_name=name, resume="allow", **options)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._swanlab.log(numbers, step=step)

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        self._swanlab.log({name: self._swanlab.Text(_markdown_table(rows))}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


TRACKERS: dict[str, Callable] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


class Mirrors:
    """The trackers of a run. Only rank 0 makes one. One that fails later is left out, since metrics.jsonl has every row."""

    def __init__(
        self,
        output_dir: str,
        names: Iterable[str],
        project: str,
        config: Optional[dict] = None,
        run_ids: Optional[dict[str, Optional[str]]] = None,
        run_name: Optional[str] = None,
    ):
        """`run_ids` are those of a run that goes on. Raises UserError if a tracker does not start."""
        known = run_ids or {}
        name = run_name or os.path.basename(os.path.realpath(output_dir))
        self._trackers: dict[str, Any] = {}
        for tracker in names:
            try:
                made = TRACKERS[tracker](output_dir, project, name, config or {}, known.get(tracker))
            except Exception as error:  # of any type: each package has its own
                raise UserError(f"--report_to {tracker}", one_line(error), CURES.get(tracker, "")) from None
            self._trackers[tracker] = made
        self.run_ids = {tracker: made.run_id for tracker, made in self._trackers.items() if made.run_id}

    def row(self, step: int, values: dict) -> None:
        """Copy the numbers of a step or of an evaluation."""
        numbers = {shared_name(key): value for key, value in values.items() if isinstance(value, (int, float))}
        self._each(lambda tracker: tracker.log(step, numbers))

    def table(self, name: str, step: int, rows: list[dict]) -> None:
        """Show rows of texts and numbers."""
        self._each(lambda tracker: tracker.table(name, step, rows))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # of any type: a service that is gone must not end the run
                print(f"--report_to {name} gets no more rows: {one_line(error)}", flush=True)
                del self._trackers[name]


def shared_name(key: str) -> str:
    """The name of a metric where curves of several trainers lie over each other: those of HF Trainer and TRL."""
    kind, own = ("eval", key.removeprefix("eval_")) if key.startswith("eval_") else ("train", key)
    return kind + "/" + (SHARED_NAMES.get(own) or OF_REWARD.sub(r"rewards/\1/mean", own))


def _markdown_table(rows: list[dict]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[" ".join(str(value).replace("|", "\\|").split()) for value in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)

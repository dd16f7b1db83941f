"""When a run saves, which checkpoints it keeps, which checkpoint it resumes from, and which signals stop it."""

import contextlib
import json
import math
import os
import signal
import time
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Optional

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.run_identity import Change, Identity
from trainer.checkpoints.run_state import (
    MAIN,
    ONLY_MODEL,
    STATE,
    CheckpointForm,
    DamagedCheckpoint,
    PendingSave,
    read_intact_state,
)
from trainer.distributed.collectives import broadcast_object, from_rank_0, gather_objects, max_over_all_ranks, together
from trainer.errors import Interrupted, UserError, one_line
from trainer.metrics import METRICS_FILE, MetricsLog, counted

FOLDER = "checkpoints"
EXPORT = "python -m trainer.cli.export {} FOLDER"
# with other values of these flags, values of evaluations do not compare
OF_EVALUATION = {"best_metric_key", "eval_dataset", "eval_split", "eval_fraction", "max_eval_samples"}
OF_EVALUATION |= {"eval_dataset_flags", "eval_samples", "eval_temperature", "eval_top_p"}


@dataclass
class Progress:
    """The progress of a run after its last step."""

    step: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    skipped_steps: int = 0
    best_metric: Optional[float] = None
    best_step: Optional[int] = None  # of that evaluation
    evals_since_best: int = 0
    wandb_run_id: Optional[str] = None
    trackio_run_id: Optional[str] = None
    mlflow_run_id: Optional[str] = None
    swanlab_run_id: Optional[str] = None


@dataclass
class Trained:
    """The objects that a checkpoint saves."""

    strategy: object
    model: object
    optimizer: object
    scheduler: object
    loader: object  # has state_dict, load_state_dict and fingerprint
    tokenizer: object
    others: dict[str, tuple] = field(default_factory=dict)  # further (model, optimizer, scheduler) triples by role
    average: object = None  # a WeightAverage of the model

    def roles(self) -> dict[str, tuple]:
        """All (model, optimizer, scheduler) triples by role."""
        return {MAIN: (self.model, self.optimizer, self.scheduler), **self.others}

    def further(self) -> list:
        """This rank's shards of everything that is saved in addition to the models."""
        return self.average.shards() if self.average else []


@dataclass(frozen=True)
class SavePolicy:
    """When to save, in which form, and which checkpoints to keep."""

    save_steps: Optional[int] = None
    interval_minutes: Optional[float] = None
    max_num: Optional[int] = None
    max_gigabytes: Optional[float] = None
    best_metric_key: Optional[str] = None
    early_stopping_patience: Optional[int] = None
    portable: bool = False
    background: bool = False
    hf_weights: bool = False
    only_model: bool = False

    @property
    def resumes(self) -> str:
        """What a checkpoint of this run is good for, in words."""
        if self.only_model:
            return "its checkpoint has the model only, so no run goes on from it"
        return "--load_checkpoint resumes from there"

    def has_lost_patience(self, progress: Progress) -> bool:
        """Whether --early_stopping_patience ends the run here."""
        return self.early_stopping_patience is not None and progress.evals_since_best >= self.early_stopping_patience


class Checkpoints:
    """The checkpoints of one run, in `<output_dir>/checkpoints`. All methods are collective over all ranks."""

    def __init__(self, output_dir: str, trained: Trained, policy: SavePolicy, identity: Identity):
        self.root = os.path.abspath(os.path.join(output_dir, FOLDER))
        self.trained, self.policy, self.identity = trained, policy, identity
        self.changes: list[Change] = []  # since the checkpoint that was loaded
        self.kept_rows: list[str] = []  # of metrics.jsonl: not on disk yet when that checkpoint was saved
        self.progress = Progress()  # of that checkpoint
        self.metrics: Optional[MetricsLog] = None
        self._pending: Optional[tuple[PendingSave, bool]] = None
        self._saved_at = time.monotonic()
        self._place = (output_dir, _inode_of(output_dir))
        if trained.strategy.is_rank_0():
            for folder in (output_dir, self.root):
                store.remove_temporaries(folder)

    # --- resuming

    def resume(self, wanted: Optional[str], total_steps: int) -> Progress:
        """Load the checkpoint that --load_checkpoint names, or the latest intact one. If there is none, start fresh.

        Says so if the run of `total_steps` is already at its end.
        """
        self.progress = progress = self._resume(wanted)
        if progress.step >= total_steps or self.policy.has_lost_patience(progress):
            self.trained.strategy.print(
                f"nothing left to do: step {progress.step} of {total_steps} (more: {self._flags_to_go_on(progress)})"
            )
        return progress

    def _flags_to_go_on(self, progress: Progress) -> str:
        if self.policy.has_lost_patience(progress):
            return "a larger --early_stopping_patience"
        return "--max_steps, --max_epochs"

    def _resume(self, wanted: Optional[str]) -> Progress:
        if wanted is None:
            return Progress()
        strategy = self.trained.strategy
        folders = broadcast_object(store.checkpoints_to_load(self.root, wanted) if strategy.is_rank_0() else None)
        if not folders:
            strategy.print(f"no checkpoint in {self.root} yet: starting fresh")
            return Progress()
        for number, folder in enumerate(folders, start=1):
            try:
                return self.load(folder)
            except DamagedCheckpoint as error:
                if number == len(folders):
                    raise
                strategy.print(f"{error.found}; falling back to {folders[number]}")
        raise AssertionError("not reached")

    def load(self, folder: str) -> Progress:
        """Restore the run as it was when it saved `folder`. Raises UserError if that is damaged or is of another run."""
        t = self.trained
        self.changes = self._compare(folder)
        with of_its_state(folder):
            state = t.strategy.load_ckpt(folder, t.roles(), t.further())
            progress, self.kept_rows = progress_of(state), rows_of(state)
            self._go_on_from_best(progress)
            t.loader.load_state_dict(state["position"])
        t.strategy.print(f"resumed from {folder} at step {progress.step}")
        if "identity" not in state:
            t.strategy.print("this checkpoint is of an older version: only its data was compared with the run")
        if self.changes:
            t.strategy.print(f"changed since the checkpoint: {'; '.join(map(str, self.changes))}")
        return progress

    def _compare(self, folder: str) -> list[Change]:
        """What changed since `folder` was saved: rank 0 looks, and all ranks raise what it raises (broadcast)."""

        def look() -> list[Change]:
            state = read_intact_state(folder)
            if state.get(ONLY_MODEL):
                found = f"{folder} has no optimizer to go on with: it was saved for its model only"
                raise UserError("--load_checkpoint", found, instead=f"{EXPORT.format(folder)} makes it a --pretrain.")
            with of_its_state(folder):
                return self.identity.compare(folder, state, self.trained.loader.fingerprint())

        return from_rank_0(look)

    def _go_on_from_best(self, progress: Progress) -> None:
        """Let `best` be the best checkpoint of the course up to here. Forget a best value of another metric or data, or
        whose checkpoint is in another run folder or gone."""
        if not self.policy.best_metric_key or progress.best_metric is None:
            return
        if progress.best_step is None:  # a checkpoint from before best_step
            progress.best_step = from_rank_0(lambda: store.linked_step(self.root, progress.step))
        folder = self._folder(progress.best_step)
        is_here = from_rank_0(lambda: os.path.isdir(folder))
        if is_here and not OF_EVALUATION & {change.name for change in self.changes}:
            together(lambda: self._set_best(folder), self.root, "cannot be changed")
            return
        why = "evaluations have changed" if is_here else f"its checkpoint is not in {self.root}"
        self.trained.strategy.print(f"the best evaluation so far does not count any more: {why}")
        progress.best_metric = progress.best_step = None
        progress.evals_since_best = 0

    def load_best(self, progress: Progress) -> Progress:
        """Load the weights of the best evaluation, at the end of a run. Returns the progress up to that evaluation."""
        t, step = self.trained, progress.best_step
        if step is None:
            return progress
        t.strategy.print(f"best {self.policy.best_metric_key}: {progress.best_metric:.9g} at step {step}")
        if step == progress.step:
            return progress
        folder = self._folder(step)
        with of_its_state(folder):
            return progress_of(t.strategy.load_ckpt(folder, t.roles(), t.further()))

    # --- saving

    def after_step(
        self, progress: Progress, eval_metrics: Optional[dict], stop_signal: Optional[int], num_steps: int = 1
    ) -> None:
        """Save if a checkpoint is due after the last `num_steps`. If any rank received a signal, save a checkpoint and
        then raise Interrupted. If metrics.jsonl cannot be written for long, save and raise UserError."""
        policy, strategy = self.policy, self.trained.strategy
        due = policy.interval_minutes and time.monotonic() - self._saved_at >= 60 * policy.interval_minutes
        unfinished = self._pending is not None and not self._pending[0].done()
        # one tiny all-reduce per step, because ranks have different clocks and signals but must do the same
        stuck = self.metrics is not None and self.metrics.is_stuck
        flags = [stop_signal or 0, bool(due), unfinished, stuck]
        stop, due, unfinished, stuck = max_over_all_ranks(flags, strategy.device)
        if self._pending and not unfinished:
            self.finish()
        is_best = self._is_best(progress, eval_metrics)
        if stop or due or is_best or stuck or (policy.save_steps and progress.step % policy.save_steps < num_steps):
            self.save(progress, is_best=is_best, background=policy.background and not (stop or stuck))
        if stuck:
            self._end_stuck(progress)
        if stop:
            name = signal.Signals(int(stop)).name
            raise Interrupted(f"stopped by {name} after step {progress.step}; {policy.resumes}")

    def end(self, progress: Progress) -> None:
        """Wait for the last save. If rows of metrics.jsonl still wait, save them with a checkpoint. Say what ended early."""
        if self.policy.has_lost_patience(progress):
            found = f"early stopping after step {progress.step}: {counted(progress.evals_since_best, 'evaluation')} in a row without"
            self.trained.strategy.print(f"{found} a better {self.policy.best_metric_key}")
        self.finish()
        self.check_place()
        waits = self.metrics is not None and bool(self.metrics.waiting)
        if max_over_all_ranks([waits], self.trained.strategy.device)[0]:
            self.save(progress)

    def _end_stuck(self, progress: Progress) -> None:
        fault = broadcast_object(self.metrics.fault if self.metrics else None)
        found = f"cannot be written: {fault}; the checkpoint of step {progress.step} has its rows"
        instead = (
            "Free disk space." if self.policy.only_model else "Free disk space, and resume with --load_checkpoint."
        )
        raise UserError(METRICS_FILE, found, instead=instead)

    def check_place(self) -> None:
        """Raise UserError on all ranks if the run folder was moved or replaced meanwhile: a save would make a new one."""
        folder, was = self._place
        is_there = not self.trained.strategy.is_rank_0() or _inode_of(folder) == was
        if not all(gather_objects(is_there)):
            found = f"{folder} was moved or replaced while the run wrote to it"
            raise UserError("--output_dir", found, instead="Move it back, and resume with --load_checkpoint.")

    def _is_best(self, progress: Progress, eval_metrics: Optional[dict]) -> bool:
        key = self.policy.best_metric_key
        if not (key and eval_metrics):
            return False
        value, best = eval_metrics[key], progress.best_metric
        better = best is None or (value < best if is_better_when_lower(key) else value > best)
        if math.isfinite(value) and better:
            progress.best_metric, progress.best_step, progress.evals_since_best = value, progress.step, 0
            return True
        progress.evals_since_best += 1
        return False

    def _folder(self, step: Optional[int]) -> str:
        return os.path.join(self.root, f"step_{step}")

    def _set_best(self, folder: str) -> None:
        if self.trained.strategy.is_rank_0():
            store.set_best(self.root, folder)

    def save(self, progress: Progress, *, is_best: bool = False, background: bool = False) -> str:
        """Write step_N and return its folder. In the background, the folder appears later."""
        self.finish()
        self.check_place()
        t, policy = self.trained, self.policy
        state = {
            "progress": asdict(progress),
            "position": t.loader.state_dict(),
            "data": t.loader.fingerprint(),
            "arguments": self.identity.record["flags"],
            "identity": self.identity.record,
            "waiting_rows": list(self.metrics.waiting) if self.metrics else [],
        }
        folder = self._folder(progress.step)
        form = CheckpointForm(policy.portable, background, policy.hf_weights, policy.only_model)
        pending = t.strategy.save_ckpt(folder, t.roles(), t.tokenizer, state=state, form=form, further=t.further())
        self._pending, self._saved_at = (pending, is_best), time.monotonic()
        if not background:
            self.finish()
        return folder

    def finish(self) -> None:
        """Wait for a save in the background. The new checkpoint is then complete, so remove the superfluous ones."""
        if self._pending is None:
            return
        (pending, is_best), self._pending = self._pending, None
        folder = pending.finish()
        gigabytes = self.policy.max_gigabytes

        def tidy() -> None:
            if is_best:
                store.set_best(self.root, folder)
            store.rotate(self.root, self.policy.max_num, None if gigabytes is None else gigabytes * 1e9, folder)

        together(lambda: tidy() if self.trained.strategy.is_rank_0() else None, self.root, "cannot be changed")


def _inode_of(folder: str) -> Optional[tuple[int, int]]:
    """(device, inode) of a folder, which a rename keeps. None without a folder."""
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


@contextlib.contextmanager
def of_its_state(folder: str) -> Iterator[None]:
    """Raise DamagedCheckpoint for values in the state of a checkpoint that no run writes. Another program may have."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        found = f"{folder}: {STATE} holds values that no run writes: {type(error).__name__}: {one_line(error)}"
        raise DamagedCheckpoint("--load_checkpoint", found) from None


def progress_of(state: dict) -> Progress:
    """The progress in the state of a checkpoint. Raises TypeError for other keys, or for values of other types."""
    progress = Progress(**state["progress"])
    for own in fields(Progress):
        value, kinds = getattr(progress, own.name), typing.get_args(own.type) or (own.type,)
        if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, int) and value < 0):
            raise TypeError(f"progress has {own.name} {str(value)[:40]!r}")
    return progress


def rows_of(state: dict) -> list[str]:
    """The rows of metrics.jsonl that waited. Raises TypeError or ValueError for what is no row."""
    rows = state.get("waiting_rows", [])
    if not all(row.endswith("\n") and isinstance(json.loads(row), dict) for row in rows):
        raise ValueError("waiting_rows has a line that is no row")
    return rows


def is_better_when_lower(key: str) -> bool:
    """Losses and perplexities are better when lower. Every other metric is better when higher."""
    return "loss" in key or "perplexity" in key

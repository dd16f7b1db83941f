"""When a run saves, which checkpoints it keeps, which checkpoint it resumes from, and which signals stop it."""

import math
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Optional

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.run_state import MAIN, CheckpointForm, DamagedCheckpoint, PendingSave
from trainer.distributed.collectives import broadcast_object, max_over_all_ranks
from trainer.errors import Interrupted, UserError
from trainer.metrics import MetricsLog

FOLDER = "checkpoints"
# a position in the data means the same samples only if these flags have the same values
DATA_FLAGS = {
    "train_batch_size": "--train_batch_size",
    "seed": "--seed",
    "shuffle": "--no_shuffle",
    "data": "--dataset",
    "streaming_buffer": "--streaming_buffer",
    "rollout_batch_size": "--rollout_batch_size",
    "n_samples_per_prompt": "--n_samples_per_prompt",
}


@dataclass
class Progress:
    """The progress of a run after its last step."""

    step: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    skipped_steps: int = 0
    best_metric: Optional[float] = None
    wandb_run_id: Optional[str] = None


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
    portable: bool = False
    background: bool = False
    hf_weights: bool = False


class Checkpoints:
    """The checkpoints of one run, in `<output_dir>/checkpoints`. All methods are collective over all ranks."""

    def __init__(self, output_dir: str, trained: Trained, policy: SavePolicy, arguments: dict):
        self.root = os.path.abspath(os.path.join(output_dir, FOLDER))
        self.trained, self.policy, self.arguments = trained, policy, arguments
        self.metrics: Optional[MetricsLog] = None
        self._pending: Optional[tuple[PendingSave, bool]] = None
        self._saved_at = time.monotonic()
        if trained.strategy.is_rank_0():
            for folder in (output_dir, self.root):
                store.remove_temporaries(folder)

    # --- resuming

    def resume(self, wanted: Optional[str]) -> Progress:
        """Load the checkpoint that --load_checkpoint names, or the latest intact one. If there is none, start fresh."""
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
        """Restore the run as it was when it saved `folder`. Raises UserError if that is damaged or has other data."""
        t = self.trained
        state = t.strategy.load_ckpt(folder, t.roles(), t.further())
        mine = t.loader.fingerprint()
        for key, flag in DATA_FLAGS.items():
            if key in mine and state["data"].get(key) != mine[key]:
                found = f"{mine[key]} is not what {folder} was trained with"
                raise UserError(flag, found, f"{state['data'].get(key)}, or a new run")
        t.loader.load_state_dict(state["position"])
        t.strategy.print(f"resumed from {folder} at step {state['progress']['step']}")
        return Progress(**state["progress"])

    # --- saving

    def after_step(
        self, progress: Progress, eval_metrics: Optional[dict], stop_signal: Optional[int], num_steps: int = 1
    ) -> None:
        """Save if a checkpoint is due after the last `num_steps`. If any rank received a signal, save a checkpoint and
        then raise Interrupted."""
        policy, strategy = self.policy, self.trained.strategy
        due = policy.interval_minutes and time.monotonic() - self._saved_at >= 60 * policy.interval_minutes
        unfinished = self._pending is not None and not self._pending[0].done()
        # one tiny all-reduce per step, because ranks have different clocks and signals but must do the same
        stop, due, unfinished = max_over_all_ranks([stop_signal or 0, bool(due), unfinished], strategy.device)
        if self._pending and not unfinished:
            self.finish()
        is_best = self._is_best(progress, eval_metrics)
        if stop or due or is_best or (policy.save_steps and progress.step % policy.save_steps < num_steps):
            self.save(progress, is_best=is_best, background=policy.background and not stop)
        if stop:
            name = signal.Signals(int(stop)).name
            raise Interrupted(f"stopped by {name} after step {progress.step}; --load_checkpoint resumes from there")

    def _is_best(self, progress: Progress, eval_metrics: Optional[dict]) -> bool:
        key = self.policy.best_metric_key
        if not (key and eval_metrics):
            return False
        value, best = eval_metrics[key], progress.best_metric
        better = best is None or (value < best if is_better_when_lower(key) else value > best)
        if math.isfinite(value) and better:
            progress.best_metric = value
            return True
        return False

    def save(self, progress: Progress, *, is_best: bool = False, background: bool = False) -> str:
        """Write step_N and return its folder. In the background, the folder appears later."""
        self.finish()
        t, policy = self.trained, self.policy
        state = {
            "progress": asdict(progress),
            "position": t.loader.state_dict(),
            "data": t.loader.fingerprint(),
            "arguments": self.arguments,
        }
        folder = os.path.join(self.root, f"step_{progress.step}")
        form = CheckpointForm(policy.portable, background, policy.hf_weights)
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
        if self.trained.strategy.is_rank_0():
            if is_best:
                store.set_best(self.root, folder)
            gigabytes = self.policy.max_gigabytes
            store.rotate(self.root, self.policy.max_num, None if gigabytes is None else gigabytes * 1e9)


def is_better_when_lower(key: str) -> bool:
    """Losses and perplexities are better when lower. Every other metric is better when higher."""
    return "loss" in key or "perplexity" in key


# SIGUSR1 is Slurm's warning before preemption
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Inside, the first signal is only noted. The next signal ends the process at once, as it does outside."""

    def __init__(self):
        self.received: Optional[int] = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, _type, error, _traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        quiet = (RuntimeError, UserError) if int(os.environ.get("RANK", 0)) else RuntimeError
        if self.received and isinstance(error, quiet):
            # when one rank dies, torchrun ends the others with SIGTERM; rank 0 prints an error that all ranks have
            name, reason = signal.Signals(self.received).name, str(error).splitlines()[0]
            raise Interrupted(f"stopped by {name} before the step was done ({reason})") from None

    def _note(self, number: int, _frame) -> None:
        self.received = number
        for other in SIGNALS:  # the kernel then ends the process, even if Python cannot run a handler
            signal.signal(other, signal.SIG_DFL)

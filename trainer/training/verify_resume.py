"""`--verify_resume K`: prove, with this run on this machine, that a checkpoint loses nothing."""

import hashlib
import itertools
from collections.abc import Callable

from trainer.errors import UserError
from trainer.metrics import counted
from trainer.training.checkpointing import Checkpoints, Progress, Trained
from trainer.training.loop import LossFunction, endless, train_step

COMPARED = ("batch_hash", "loss", "grad_norm", "lr", "reward", "weights_checksum", "value_loss", "critic_grad_norm")


def verify_resume(checkpoints: Checkpoints, progress: Progress, loss_fn: LossFunction, num_steps: int) -> str:
    """Check that K steps from a loaded checkpoint are bitwise the same as K steps without the loading.

    The order: K steps, save a checkpoint, K steps, load the checkpoint, the same K steps again. Returns the line that
    reports success. Raises UserError if anything differs.
    """
    checkpoints.trained.model.train()
    return verify_replay(checkpoints, progress, lambda now: _run(checkpoints.trained, now, loss_fn, num_steps))


def verify_replay(checkpoints: Checkpoints, progress: Progress, run: Callable[[Progress], list[dict]]) -> str:
    """`verify_resume` for any kind of training. `run(progress)` does some steps and returns their rows."""
    t = checkpoints.trained
    run(progress)
    folder = checkpoints.save(progress)
    first, first_weights = run(progress), weights_hash(t.strategy, t.model)
    progress = checkpoints.load(folder)
    second, second_weights = run(progress), weights_hash(t.strategy, t.model)
    for row, again in zip(first, second, strict=True):
        for key in [key for key in COMPARED if key in row]:
            if row[key] != again[key]:
                raise UserError(
                    "--verify_resume", f"step {row['step']}: {key} is {row[key]!r}, but {again[key]!r} in the replay"
                )
    if first_weights != second_weights:
        raise UserError("--verify_resume", f"equal losses, but different weights after step {progress.step}")
    return f"verify_resume: {counted(len(first), 'step')} from {folder} replayed, bitwise the same"


def _run(t: Trained, progress: Progress, loss_fn: LossFunction, num_steps: int) -> list[dict]:
    batches = itertools.islice(endless(t.loader), num_steps)
    return [train_step(t.strategy, t.model, t.optimizer, t.scheduler, batch, loss_fn, progress) for batch in batches]


def weights_hash(strategy, model) -> str:
    """A hash of every bit of the full weights (all-gather, one weight at a time)."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in strategy.iter_full_params(model):
        digest.update(name.encode())
        digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()

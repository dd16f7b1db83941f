"""Save and load a whole run: the pieces of its tensors, the random states of every rank, and the rest as JSON.

Nothing is ever unpickled: tensors are safetensors, everything else is JSON. torch.distributed.checkpoint's own metadata
and DeepSpeed's engine.load_checkpoint both unpickle (`weights_only=False`), so neither is used for files.
"""

import base64
import dataclasses
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.strategies import checkpoint_store as store
from trainer.strategies.checkpoint_pieces import Piece, PieceReader, full_pieces, write_pieces
from trainer.strategies.ranks import gather_objects

STATE = "state.json"
FORMAT = 1
HF_FOLDER = "hf"  # config and tokenizer; the model's weights too with --save_hf_ckpt


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those that were written."""


# --- random states


def random_states(device: torch.device) -> dict:
    """The state of every random generator of this rank, as JSON values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return states


def restore_random_states(states: dict, device: torch.device) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def set_scheduler_step(scheduler, step: int) -> None:
    """Put a LambdaLR (all that transformers.get_scheduler makes of the arguments are) at `step`, exactly."""
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler.last_epoch, scheduler._last_lr = step, rates


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer remembers of a tensor that it steps; made here where no step has made it yet."""
    state = optimizer.state[parameter]
    if not state:
        new_state = adam_state if isinstance(optimizer, torch.optim.AdamW) else optimizer.new_state
        state.update(new_state(parameter))
    return dict(state)


def adam_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """That of torch's fused AdamW before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def of_role(role: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a further model of a run, such as a critic, under keys of their own: `critic:weight/...`."""
    for piece in pieces:
        yield dataclasses.replace(piece, key=f"{role}:{piece.key}")


# --- saving


def together(action: Callable, allowed: str = "") -> list:
    """The results of `action()` on every rank (one all-gather over all ranks), or one UserError on every rank alike."""
    try:
        result, problem = action(), None
    except OSError as error:
        result, problem = None, f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    outcomes = gather_objects((result, problem))
    for rank, (_, found) in enumerate(outcomes):
        if found:
            raise UserError("checkpoint", f"rank {rank}: {found}", allowed)
    return [value for value, _ in outcomes]


class PendingSave:
    """A checkpoint being written. `done` is this rank's view; `finish` is collective and makes the folder appear."""

    def __init__(self, folder: str, write: Callable[[], dict], portable: bool, background: bool):
        self.folder, self._write, self._portable = folder, write, portable
        self._entries: dict[str, dict] = {}
        self._error: Optional[Exception] = None
        self._thread = threading.Thread(target=self._run, daemon=True) if background else None
        if self._thread:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._entries = self._write()
        except Exception as error:  # of any type: `finish` raises it, so that no incomplete folder gets its name
            self._error = error

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> str:
        """Wait for every rank (all ranks), then check, rename and return the folder; a UserError leaves no trace of it."""
        if self._thread:
            self._thread.join()
        temporary = self.folder + ".tmp"
        try:
            entries = _merge(together(self._result, allowed="free the disk; older checkpoints are intact"))
            if self._portable:
                entries = _make_portable(temporary, entries)
            together(lambda: store.commit(temporary, self.folder, entries) if dist.get_rank() == 0 else None)
        except UserError:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.folder

    def _result(self) -> dict:
        if self._error:
            raise self._error
        return self._entries


def _merge(entries_of_ranks: list[dict]) -> dict[str, dict]:
    return {name: entry for entries in entries_of_ranks for name, entry in entries.items()}


def _make_portable(temporary: str, entries: dict[str, dict]) -> dict[str, dict]:
    """Put the pieces of all ranks together to full tensors (all ranks share the work) and remove the pieces."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def write() -> dict:
        reader = PieceReader(
            temporary, entries
        )  # by name: other ranks may already write their full tensors beside them
        return write_pieces(full_pieces(reader, rank, world_size), temporary, f"full-{rank:05d}")

    full = _merge(together(write, allowed="free the disk; older checkpoints are intact"))
    rest = {name: entry for name, entry in entries.items() if not name.endswith(".safetensors")}
    if rank == 0:
        for name in entries.keys() - rest.keys():
            os.remove(os.path.join(temporary, name))
    return {**rest, **full}


def save(
    folder: str,
    pieces: Iterable[Piece],
    state: dict,
    device: torch.device,
    *,
    portable: bool,
    background: bool,
    export: Callable[[str], None],
) -> PendingSave:
    """Start to write a checkpoint; collective. `export(folder)` adds the Hugging Face part at once.

    In the background, the pieces are first copied to host memory, so that training can change them meanwhile.
    """
    temporary, rank = folder + ".tmp", dist.get_rank()

    def make_folder() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    together(lambda: make_folder() if rank == 0 else None, allowed="a folder that can be written")
    export(os.path.join(temporary, HF_FOLDER))
    randoms = random_states(device)
    state = {"format": FORMAT, "world_size": dist.get_world_size(), **state}
    if background:
        pieces = [_copied(piece) for piece in pieces]

    def write() -> dict:
        entries = write_pieces(pieces, temporary, f"pieces-{rank:05d}")
        name = f"random-{rank:05d}.json"
        entries[name] = store.write_json(os.path.join(temporary, name), randoms)
        if rank == 0:
            entries[STATE] = store.write_json(os.path.join(temporary, STATE), state)
        return entries

    return PendingSave(folder, write, portable, background)


def _copied(piece: Piece) -> Piece:
    tensor = piece.tensor.to("cpu", copy=True) if piece.is_written else piece.tensor
    return Piece(piece.key, piece.full_shape, piece.offset, piece.box, piece.start, tensor, piece.is_written)


# --- loading


def check(folder: str) -> None:
    """Hash every file of a checkpoint, a share on each rank (all ranks). Raises DamagedCheckpoint on every rank alike."""
    found = together(lambda: store.find_damage(folder, dist.get_rank(), dist.get_world_size()))
    for problem in found:
        if problem:
            raise DamagedCheckpoint("--load_checkpoint", f"{folder} is damaged: {problem}")


def read_state(folder: str) -> dict:
    """The JSON state of a checkpoint. Raises UserError for one that this version cannot read."""
    with open(os.path.join(folder, STATE)) as file:
        state = json.load(file)
    if state["format"] != FORMAT:
        raise UserError("--load_checkpoint", f"{folder} has format {state['format']}", f"format {FORMAT}")
    return state


def _other_state(key: str, stored: Iterable[str]) -> Optional[str]:
    """What else an optimizer remembered of the parameter of `key`."""
    role, colon, kind_and_name = key.rpartition(":")
    name = kind_and_name.partition("/")[2]
    own = (other for other in stored if other.startswith(role + colon) and other.partition("/")[2] == name)
    return next((other for other in own if other != f"{role}{colon}weight/{name}"), None)


@torch.no_grad()
def load(folder: str, pieces: Iterable[Piece], device: torch.device, optim: str) -> dict:
    """Check a checkpoint, read this rank's pieces into their live storage and restore its random states (collective).

    Random states are those of a rank, so they come back only with as many ranks as there were. Returns the JSON state.
    Raises UserError if it is damaged, or if its optimizer was another than `optim`.
    """
    check(folder)
    state, reader = read_state(folder), PieceReader(folder)
    written = state.get("optim", "adamw")  # the only one that older checkpoints could have
    if written != optim:
        raise UserError("--optim", f"{optim}, but {folder} was written with {written}", f"--optim {written}")
    for piece in pieces:
        if piece.key.rpartition(":")[2].startswith("weight/") or piece.key in reader.shapes:
            piece.tensor.copy_(reader.read(piece))
        elif other := _other_state(piece.key, reader.shapes):
            raise UserError(
                "--load_checkpoint", f"{folder} has {other}, but no {piece.key}", "the optimizer of the run"
            )
        else:  # a parameter that has had no gradient yet has no state
            piece.tensor.zero_()
    if state["world_size"] == dist.get_world_size():
        with open(os.path.join(folder, f"random-{dist.get_rank():05d}.json")) as file:
            restore_random_states(json.load(file), device)
    return state

"""Save and load a whole run: the shards of its tensors, the random states of every rank, and the rest as JSON.

`step_N` has manifest.json, state.json, pieces.index, pieces-RANK-NUMBER.safetensors (portable: full-...), random-RANK.json,
and hf/ with --save_hf_ckpt.

Nothing is ever unpickled: tensors are safetensors, and everything else is JSON. The metadata of
torch.distributed.checkpoint and DeepSpeed's engine.load_checkpoint both unpickle (`weights_only=False`). So neither is
used for files.
"""

import base64
import dataclasses
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
import torch.distributed as dist

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints.piece_index import INDEX, Piece, PieceIndex
from trainer.checkpoints.shards import ShardReader, TensorShard, full_shards, write_shards
from trainer.distributed.collectives import gather_objects, make_patient_group, together
from trainer.distributed.pinned_memory import PinnedPool
from trainer.errors import UserError, one_line
from trainer.limits import read_text

STATE = "state.json"
FORMAT = 1
HF_FOLDER = "hf"  # config and tokenizer; with --save_hf_ckpt also the model's weights
NO_LOSS_SCALE = {"scale": 1.0, "good_steps": 0}  # the state of the loss scale without fp16
ONLY_MODEL = "only_model"  # the entry of a state without an optimizer
MAIN = "main"  # the role of a run's first model; its keys and states have no prefix
STAGING = PinnedPool()  # the copies of a save in the background; the next one has the same sizes


@dataclass(frozen=True)
class CheckpointForm:
    """How a checkpoint is written.

    `portable`: whole tensors instead of each rank's parts. `background`: training continues meanwhile. `hf_weights`:
    the Hugging Face model is added. `only_model`: no state of an optimizer, so no run can go on from it.
    """

    portable: bool = False
    background: bool = False
    hf_weights: bool = False
    only_model: bool = False


class DamagedCheckpoint(UserError):
    """The files of this checkpoint are not the files that were written."""


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
    """Put a LambdaLR at `step`, exactly. `build_scheduler` makes no other scheduler."""
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler.last_epoch, scheduler._last_lr = step, rates


def of_role(role: str, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """The shards of a further model of a run, such as a critic, with the role in their keys: `critic:weight/...`."""
    for shard in shards:
        yield dataclasses.replace(shard, key=f"{role}:{shard.key}")


def shards_of_roles(
    roles: dict[str, tuple], shards_of: Callable, further: Iterable[TensorShard]
) -> Iterator[TensorShard]:
    """The shards of all (model, optimizer, scheduler) triples by role, then `further` ones.

    `shards_of(model, optimizer)` returns the shards of one model. The keys of the role MAIN have no prefix.
    """
    for role, (model, optimizer, _) in roles.items():
        shards = shards_of(model, optimizer)
        yield from shards if role == MAIN else of_role(role, shards)
    yield from further


# --- saving

WRITING = ("checkpoint", "cannot be written")  # where, and the problem: see `together`


class PendingSave:
    """A checkpoint being written. `done` is this rank's view. `finish` is collective and makes the folder appear."""

    def __init__(self, folder: str, write: Callable[[], tuple[dict, list[Piece]]], form: CheckpointForm):
        self.folder, self._write, self._portable = folder, write, form.portable
        self._written: tuple[dict[str, dict], list[Piece]] = {}, []
        self._error: Optional[Exception] = None
        self._thread = threading.Thread(target=self._run, daemon=True) if form.background else None
        if self._thread:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._written = self._write()
        except Exception as error:  # of any type: `finish` raises it, so no incomplete folder gets its final name
            self._error = error

    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> str:
        """Wait for all ranks, then check, rename and return the folder. After a UserError, nothing of it is left."""
        if self._thread:
            self._thread.join()
        temporary = self.folder + ".tmp"
        try:
            entries = _with_index(self._result, temporary)
            if self._portable:
                entries = _make_portable(temporary, entries)
            together(lambda: store.commit(temporary, self.folder, entries) if dist.get_rank() == 0 else None, *WRITING)
        except UserError:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return self.folder

    def _result(self) -> tuple[dict, list[Piece]]:
        if self._error:
            raise self._error
        return self._written


def _with_index(results: Callable[[], tuple[dict, list[Piece]]], folder: str) -> dict[str, dict]:
    """Take what this rank wrote. Rank 0 then writes the index of all ranks (collective).

    `results()` gives this rank's entries and pieces. Returns the manifest entries of all ranks' files.
    """
    pieces: list[Piece] = []

    def take_and_note() -> dict[str, dict]:
        entries, own = results()
        pieces.extend(own)
        return entries

    full_disk = "free disk space; older checkpoints are intact"
    entries = {name: entry for own in together(take_and_note, *WRITING, full_disk) for name, entry in own.items()}
    index = _gather_index(pieces)
    [entry, *_] = together(lambda: index.write(folder) if index else None, *WRITING, full_disk)
    return {**entries, INDEX: entry}


def _gather_index(pieces: list[Piece]) -> Optional[PieceIndex]:
    """The index of the pieces of all ranks, on rank 0 (gather over all ranks). None on other ranks."""
    own, parts = PieceIndex.of_pieces(pieces), [None] * dist.get_world_size()
    if len(parts) == 1:
        return own
    dist.gather_object(own, parts if dist.get_rank() == 0 else None, group=make_patient_group(dist.group.WORLD))
    return PieceIndex.merged(parts) if dist.get_rank() == 0 else None


def _make_portable(temporary: str, entries: dict[str, dict]) -> dict[str, dict]:
    """Join the shards of all ranks into full tensors, and remove the shards. All ranks share the work."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    reader = ShardReader(temporary)  # the index names only shards, while other ranks write full tensors
    shards = full_shards(reader, rank, world_size)
    full = _with_index(lambda: write_shards(shards, temporary, f"full-{rank:05d}"), temporary)
    rest = {name: entry for name, entry in entries.items() if not name.startswith("pieces-")}
    if rank == 0:
        for name in entries.keys() - rest.keys():
            os.remove(os.path.join(temporary, name))
    return {**rest, **full}


def save(
    folder: str,
    shards: Iterable[TensorShard],
    state: dict,
    role_states: dict[str, dict],
    device: torch.device,
    form: CheckpointForm,
    export: Callable[[str], None],
) -> PendingSave:
    """Start to write a checkpoint (all ranks). `finish()` of the result makes the folder appear.

    `state` and `role_states` (by role) are JSON. `export(folder)` adds the Hugging Face part at once. For a background
    save, shards are first copied to host memory, so that training can change them meanwhile.
    """
    temporary, rank = folder + ".tmp", dist.get_rank()

    def make_folder() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)

    together(lambda: make_folder() if rank == 0 else None, *WRITING, "a folder that can be written")
    export(os.path.join(temporary, HF_FOLDER))
    randoms = random_states(device)
    others = {role: own for role, own in role_states.items() if role != MAIN}
    state = {"format": FORMAT, "world_size": dist.get_world_size(), **role_states[MAIN], "others": others, **state}
    if form.only_model:
        state[ONLY_MODEL], shards = True, (shard for shard in shards if is_weight(shard.key))
    if form.background:
        shards = _staged(shards, device)

    def write() -> tuple[dict, list[Piece]]:
        entries, pieces = write_shards(shards, temporary, f"pieces-{rank:05d}")
        name = f"random-{rank:05d}.json"
        entries[name] = store.write_json(os.path.join(temporary, name), randoms)
        exported = [name for name in store.files_below(temporary) if os.path.dirname(name) == HF_FOLDER]
        entries |= store.flush_and_hash(temporary, exported[rank :: dist.get_world_size()])
        if rank == 0:
            entries[STATE] = store.write_json(os.path.join(temporary, STATE), state)
        return entries, pieces

    return PendingSave(folder, write, form)


def _staged(shards: Iterable[TensorShard], device: torch.device) -> list[TensorShard]:
    """The shards with copies in host memory. From a GPU all of them go to pinned memory, and one wait ends them."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return STAGING.empty_like(tensor, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)

    staged = [dataclasses.replace(s, tensor=copied(s.tensor)) if s.is_written else s for s in shards]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return staged


# --- loading


def _refuse_damage(folder: str, find: Callable[[], Optional[str]]) -> None:
    """If any rank finds damage, all ranks raise DamagedCheckpoint (one all-gather over all ranks)."""
    for problem in together(find, "checkpoint", "cannot be read"):
        if problem:
            raise DamagedCheckpoint("--load_checkpoint", f"{folder} is damaged: {problem}")


def _check(folder: str, shards: list[TensorShard]) -> set[str]:
    """Hash every file of a checkpoint, a share on each rank (two all-gathers). Raises DamagedCheckpoint.

    Left out, and returned: the files that this rank needs whole. It hashes them while it reads its shards.
    """
    try:
        own = ShardReader(folder).whole_files(shards)
    except Exception:  # of any type: the index may be damaged, and then its hash says so
        own = set()
    others = set().union(*gather_objects(own))
    _refuse_damage(folder, lambda: store.find_damage(folder, dist.get_rank(), dist.get_world_size(), others))
    return own


def read_intact_state(folder: str) -> dict:
    """`read_state`, after a look at the hash of its file. Raises DamagedCheckpoint."""
    state: dict = {}

    def read() -> None:
        entry = store.read_manifest(folder).get(STATE)
        if damage := f"{STATE} is missing" if entry is None else store.file_damage(folder, STATE, entry):
            raise store.DamagedFile(damage)
        state.update(read_state(folder))

    if damage := _fault(read):
        raise DamagedCheckpoint("--load_checkpoint", f"{folder} is damaged: {damage}")
    return state


def read_state(folder: str) -> dict:
    """The JSON state of a checkpoint. Raises UserError if this version cannot read it, and ValueError for no JSON."""
    state = json.loads(read_text(os.path.join(folder, STATE)))
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise UserError("--load_checkpoint", f"{folder} has format {found!r}", f"format {FORMAT}")
    return state


def role_state(state: dict, role: str) -> dict:
    """The states of one role, from the result of `load`."""
    return state if role == MAIN else state["others"][role]


def is_weight(key: str) -> bool:
    """Whether a key names a weight of any role, not a state of an optimizer."""
    return key.rpartition(":")[2].startswith("weight/")


def _other_state(key: str, stored: Iterable[str]) -> Optional[str]:
    """The key of another optimizer state that was saved for the parameter of `key`, or None."""
    role, colon, kind_and_name = key.rpartition(":")
    name = kind_and_name.partition("/")[2]
    own = (other for other in stored if other.startswith(role + colon) and other.partition("/")[2] == name)
    return next((other for other in own if other != f"{role}{colon}weight/{name}"), None)


def _fill(shard: TensorShard, reader: ShardReader) -> None:
    """Read the values of one shard into its live storage."""
    if is_weight(shard.key) or shard.key in reader.shapes:
        shard.tensor.copy_(reader.read(shard))
    elif other := _other_state(shard.key, reader.shapes):
        found = f"{reader.folder} has {other}, but no {shard.key}"
        raise UserError("--load_checkpoint", found, "the optimizer of the run")
    else:  # a parameter that has had no gradient yet has no state
        shard.tensor.zero_()


@torch.no_grad()
def load(folder: str, shards: Iterable[TensorShard], device: torch.device, optim: str) -> dict:
    """Check a checkpoint, read this rank's shards into their live storage and restore its random states (collective).

    Random states belong to one rank, so they are restored only with the same number of ranks. Returns the JSON state.
    Raises UserError if the checkpoint is damaged, or if its optimizer was not `optim`.
    """
    shards = list(shards)
    own = _check(folder, shards)
    state, reader, randoms = _open_all(folder, own)
    written = state.get("optim", "adamw")  # older checkpoints do not name it, and have only adamw
    if written != optim:
        raise UserError("--optim", f"{optim}, but {folder} was written with {written}", f"--optim {written}")

    def fill_all() -> None:
        for shard in shards:
            _fill(shard, reader)

    _refuse_damage(folder, lambda: _fault(fill_all))
    if randoms is not None:
        _refuse_damage(folder, lambda: _fault(lambda: restore_random_states(randoms, device)))
    return state


def _open_all(folder: str, own: set[str]) -> tuple[dict, ShardReader, Optional[dict]]:
    """State, reader, and this rank's random states (None for another number of ranks). Files of `own` are hashed later."""
    found = []

    def read() -> None:
        entries, reader, state = store.read_manifest(folder), ShardReader(folder), read_state(folder)
        reader.hash_while_reading({name: entries[name] for name in own})
        found[:] = [state, reader, None]
        if state["world_size"] == dist.get_world_size():
            found[2] = json.loads(read_text(os.path.join(folder, f"random-{dist.get_rank():05d}.json")))

    _refuse_damage(folder, lambda: _fault(read))
    return tuple(found)


def _fault(read: Callable[[], None]) -> Optional[str]:
    """What is wrong with files that `read` reads, or None. Their hashes fit, but a stranger may have made them.

    Raises UserError as `read` does.
    """
    try:
        read()
    except UserError:
        raise
    except store.DamagedFile as damage:
        return str(damage)
    except OSError as error:
        return f"{os.path.basename(error.filename or 'a file')}: {error.strerror}"
    except Exception as error:  # of any type: each reader has its own
        return f"its files do not fit each other: {type(error).__name__}: {one_line(error)}"
    return None

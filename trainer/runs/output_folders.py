"""The folders that a run writes: the checks before it starts, and their locks. It imports no torch."""

import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Optional

from trainer.comma_separated import names_in
from trainer.errors import UserError
from trainer.metrics import METRICS_FILE, ROLLOUTS_FILE
from trainer.model_folders.folder_names import is_gguf

LOCK_FILE = ".lock"
NAME_MAX = 255  # bytes of one part of a path, on Linux and macOS
EXPORTED = "a checkpoint (RUN/checkpoints/step_N), a model folder, an adapter folder or a GGUF file"
WRITTEN = (LOCK_FILE, METRICS_FILE, ROLLOUTS_FILE, "certificate.json")
CONFIG = re.compile(r"config(\.\d+)?\.yaml")  # a run that goes on with other flags writes one with a number
BEFORE_STEPS = ('{"event": "start"', '{"event": "stop"')  # rows of metrics.jsonl
_locks: dict[str, int] = {}  # file descriptors by path: a lock lasts until one is closed


def check_free(folder: str, overwrite: bool, resumes: bool) -> None:
    """Raise UserError for a file, or for a folder with a run that is neither resumed nor overwritten."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("--output_dir", f"{folder} is a file", "a folder")
    if holds_run(folder) and not (resumes or overwrite):
        allowed = "another folder, --load_checkpoint to resume it, or --overwrite"
        raise UserError("--output_dir", f"{folder} holds another run", allowed)


def check_rights(folder: str, flag: str = "--output_dir") -> None:
    """Raise UserError where this user cannot make or write `folder`. Nothing is left there; `make_writable` makes it."""
    place = Path(folder).absolute()
    place = next(above for above in (place, *place.parents) if os.path.lexists(above))
    if (longest := max((len(os.fsencode(part)) for part in Path(folder).parts), default=0)) > NAME_MAX:
        raise UserError(flag, f"a name of {longest} bytes", f"up to {NAME_MAX}")
    if not place.is_dir():
        kind = "a link to nothing" if place.is_symlink() and not place.exists() else "a file"
        raise UserError(flag, f"{folder}: {place} is {kind}", "a folder, or one that can be made")
    found = "" if os.access(place, os.W_OK | os.X_OK) else "is closed to this user"
    try:  # root may write everywhere, and yet /proc takes no file
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        found = found or f"takes no new file ({error.strerror})"
    if found:
        raise UserError(flag, f"{folder}: {place} {found}", "a folder that can be written")


def check_places(source: str, target: str) -> None:
    """Raise UserError for a SOURCE that is not there and an OUT that is, or cannot be made. It imports no torch."""
    if not is_gguf(source) and not os.path.isdir(source):
        raise UserError("SOURCE", f"{os.path.abspath(source)}: no such folder", EXPORTED)
    if os.path.exists(target):
        raise UserError("OUT", f"{os.path.abspath(target)} exists already", "a new folder")
    check_rights(target, "OUT")


def check_run_folder(output_dir: Optional[str], sources: dict[str, Optional[str]]) -> None:
    """Raise UserError for a run folder that is no place to write and remove files in.

    `sources` are the flags that name models and data, comma-separated.
    """
    if not output_dir:
        return
    place = os.path.realpath(output_dir)
    if place in ("/", os.path.realpath(os.path.expanduser("~"))):
        raise UserError("--output_dir", f"{output_dir} is {place}", "a folder within it")
    for name, value in sources.items():
        if any(os.path.realpath(source) == place for source in names_in(value)):
            raise UserError(
                "--output_dir", f"{output_dir} is the folder of --{name}", "another folder, or one within it"
            )
    if os.path.exists(os.path.join(place, "config.json")):
        raise UserError("--output_dir", f"{output_dir} holds a model", "another folder, or one within it")


def open_folder(folder: str, overwrite: bool, resumes: bool) -> None:
    """Make the run folder and lock it. A run that is overwritten is removed. Raises like `check_free`."""
    check_free(folder, overwrite, resumes)
    _check_files(folder)
    if not resumes and (holds_run(folder) or os.path.exists(os.path.join(folder, METRICS_FILE))):
        lock_folder(folder)
        files = f"{METRICS_FILE} config.yaml certificate.json {ROLLOUTS_FILE}"
        for name in f"{files} tensorboard checkpoints evaluations ahead judge_cache base".split():
            path = os.path.join(folder, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
    make_writable("--output_dir", folder)
    lock_folder(folder)


def _check_files(folder: str) -> None:
    """Refuse a run folder whose files are pipes, devices or links: what the run writes would go elsewhere."""
    place = os.path.realpath(folder)
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        is_own = os.path.isfile(path) and os.path.dirname(os.path.realpath(path)) == place
        if not is_own and (name in WRITTEN or CONFIG.fullmatch(name)):
            raise UserError("--output_dir", f"{path} is no regular file of this folder", "another folder")


def lock_folder(folder: str) -> None:
    """Make this process the only writer of a run folder until it ends. Raises UserError if another run writes there.

    The kernel frees the lock when its process dies, so no lock is ever stale. The file says who holds it.
    """
    path = os.path.realpath(os.path.join(folder, LOCK_FILE))
    if path in _locks:
        return
    lock = _locks[path] = os.open(path, os.O_RDWR | os.O_CREAT)
    for seconds in [0.25] * 20 + [0]:  # a run that was just killed may need a moment to go
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            time.sleep(seconds)
        except OSError:
            return  # a file system without locks
    else:
        found = f"{folder} is being written by another run ({os.read(lock, 500).decode()})"
        raise UserError("--output_dir", found, "another folder, or end that run first")
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())


def holds_run(folder: str) -> bool:
    """Whether a run has left results there. A run with --verify_resume leaves only checkpoints, a failed start nothing."""
    checkpoints = os.path.join(folder, "checkpoints")
    if os.path.isdir(checkpoints) and any(os.scandir(checkpoints)):
        return True
    return has_rows(os.path.join(folder, METRICS_FILE)) or os.path.exists(os.path.join(folder, ROLLOUTS_FILE))


def has_rows(metrics: str) -> bool:
    """Whether a metrics file has more than the start and the stop of a run that made no step."""
    if not os.path.exists(metrics):
        return False
    with open(metrics, errors="replace") as lines:
        return any(line.strip() and not line.startswith(BEFORE_STEPS) for line in lines)


def make_writable(flag: str, folder: str) -> None:
    """Make `folder` and write a temporary file in it. Raises UserError if that fails."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(flag, f"{folder}: {error.strerror}", "a folder that can be written") from None


def check_saved_models(
    saved: list[str],
    sources: dict[str, Optional[str]],
    save_path: Optional[str],
    output_dir: Optional[str],
    overwrite: bool,
) -> None:
    """Raise UserError if saving would replace anything but an old model. Saving replaces the whole folder.

    `sources` are the flags that name folders of models, comma-separated.
    """
    flag, other = "--save_path", "a new or empty folder, or a model to replace"
    if not save_path:
        flag, other = "--output_dir", "another folder, or --save_path"
    for path in saved:
        target = os.path.realpath(path)
        for name, value in {"output_dir": output_dir, **sources}.items():
            for folder in names_in(value):
                if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                    raise UserError(flag, f"{path} would replace --{name}", "another folder, or one within it")
        if os.path.isfile(target):
            raise UserError(flag, f"{path} is a file", "a folder")
        if os.path.ismount(target):
            raise UserError(flag, f"{path} is a mount point, which cannot be replaced", "a folder within it")
        held = set(os.listdir(target)) if os.path.isdir(target) else set()
        if held and not held & {"config.json", "adapter_config.json"}:
            raise UserError(flag, f"{path} holds no model", other)
        if held and not (save_path or overwrite or holds_run(output_dir)):
            raise UserError(flag, f"{path} holds a model that no run in --output_dir wrote", other)

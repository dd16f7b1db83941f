"""Checkpoint folders on disk. A folder is complete or absent, every file has a hash, and old folders are rotated.

This file handles only files, not tensors. A checkpoint is written to `step_N.tmp`, flushed, checked and renamed. So a
folder named `step_N` was complete once. Its `manifest.json` holds the size and hash of every file, so later damage is
noticed.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Optional

from trainer.errors import UserError
from trainer.limits import is_inside, opened, read_text
from trainer.metrics import counted

MANIFEST = "manifest.json"
LATEST = "latest"  # what --load_checkpoint means without a value
BEST = "best"  # a symbolic link to the checkpoint with the best metric
STEP = re.compile(r"step_\d+")  # the name of a complete checkpoint
CHUNK_BYTES = 1 << 22


def hash_file(path: str) -> dict:
    """{"size", "blake2b"} of a regular file."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    with opened(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "blake2b": digest.hexdigest()}


def write_file(path: str, data: bytes) -> dict:
    """Write a file and flush it to the disk. Returns its {"size", "blake2b"}. Raises OSError."""
    return write_parts(path, [data])


def write_parts(path: str, parts: Iterable) -> dict:
    """The same for a file that comes in parts of bytes. No part is kept when the next one is made.

    The hash is of the bytes in memory. Only the size and both ends are compared with the disk: loading a checkpoint
    hashes every byte.
    """
    digest, size, begin, end = hashlib.blake2b(digest_size=32), 0, b"", bytearray()
    with open(path, "wb") as file, ThreadPoolExecutor(1) as thread:
        for part in parts:
            hashing = thread.submit(digest.update, part)  # it runs while the disk writes, without Python's lock
            file.write(part)
            file.flush()
            os.posix_fadvise(file.fileno(), size, len(part), os.POSIX_FADV_DONTNEED)  # the disk starts to write
            size += len(part)
            begin += part[: CHUNK_BYTES - len(begin)]
            end += part[-CHUNK_BYTES:]
            del end[:-CHUNK_BYTES]
            hashing.result()
            del part, hashing
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # then the bytes come from the disk
        ends = file.read(len(begin)), file.seek(0, os.SEEK_END), file.seek(max(0, size - len(end))), file.read()
    if ends != (begin, size, size - len(end), end):
        raise OSError(errno.EIO, "reads back other bytes than were written", path)
    return {"size": size, "blake2b": digest.hexdigest()}


def write_json(path: str, value) -> dict:
    return write_file(path, json.dumps(value, indent=1, sort_keys=True).encode())


def flush_folder(folder: str) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def files_below(folder: str) -> list[str]:
    """Paths of all files below `folder`, relative to it."""
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in paths)


def _manifest_bytes(content: dict) -> bytes:
    """The only form of a manifest, with its own hash in it. A file with any other byte is damaged."""
    own = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()
    return (json.dumps({**content, "blake2b": own}, sort_keys=True) + "\n").encode()


def flush_and_hash(folder: str, names: list[str]) -> dict[str, dict]:
    """The entries of files that others wrote, once they are on the disk. Raises OSError."""
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
    return {name: hash_file(os.path.join(folder, name)) for name in names}


def commit(temporary: str, folder: str, known: dict[str, dict]) -> None:
    """Write the manifest of a finished `temporary` folder and give it its final name.

    `known` holds the entries of files that were flushed and hashed when written. The rest is flushed and hashed here.
    """
    files = known | flush_and_hash(temporary, [name for name in files_below(temporary) if name not in known])
    number = 1 + max([0, *(_place(path)[0] for path in _folders(os.path.dirname(folder)))])
    content = {"files": files, "number": number, "written_at": time.time()}
    write_file(os.path.join(temporary, MANIFEST), _manifest_bytes(content))
    for parent, _, _ in os.walk(temporary):
        flush_folder(parent)
    if os.path.exists(folder):  # it is damaged, or a run has resumed from an earlier checkpoint
        os.replace(folder, folder + ".old.tmp")
    os.replace(temporary, folder)
    flush_folder(os.path.dirname(folder))
    shutil.rmtree(folder + ".old.tmp", ignore_errors=True)


class DamagedFile(Exception):
    """A file of a checkpoint is not the one that was written. The text says how."""


def read_manifest(folder: str) -> dict[str, dict]:
    """The entries of all files of a checkpoint by name. Raises DamagedFile."""
    return _read_manifest(folder)["files"]


def _read_manifest(folder: str) -> dict:
    try:
        written = read_text(os.path.join(folder, MANIFEST)).encode()
        content = json.loads(written)
        del content["blake2b"]
        if _manifest_bytes(content) == written and _is_manifest(content):
            return content
    except FileNotFoundError:
        raise DamagedFile(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError):
        pass
    raise DamagedFile(f"{MANIFEST} is damaged")


def _is_manifest(content: dict) -> bool:
    """Whether a manifest with its own hash has the values of one. Its names stay in the folder of the checkpoint."""
    entries = content["files"].items()
    return (
        isinstance(content["written_at"], float)
        and isinstance(content.get("number", 0), int)
        and all(
            is_inside(name) and isinstance(entry["size"], int) and isinstance(entry["blake2b"], str)
            for name, entry in entries
        )
    )


def file_damage(folder: str, name: str, wanted: dict, by_size: bool = False) -> Optional[str]:
    """What is wrong with a file of a checkpoint, whose entry in the manifest is `wanted`, or None.

    Hashes the file, unless only its size is asked for.
    """
    path = os.path.join(folder, name)
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):  # a pipe would wait, and a device may never end
            return f"{name} is no regular file"
        if facts.st_size != wanted["size"]:
            return f"{name} has {counted(facts.st_size, 'byte')} instead of {wanted['size']}"
        is_intact = by_size or hash_file(path) == wanted
        return None if is_intact else f"{name} does not have the bytes that were written"
    except OSError as error:
        return f"{name}: {error.strerror}"


def find_damage(
    folder: str, part: int = 0, num_parts: int = 1, without: Iterable[str] = (), by_size: bool = False
) -> Optional[str]:
    """What is wrong with a checkpoint, in a few words, or None. Rank `part` of `num_parts` hashes its share.

    The files of `without` are left out. With `by_size`, no file but the manifest is read.
    """
    try:
        files = read_manifest(folder)
    except DamagedFile as damage:
        return str(damage)
    for name in sorted(files.keys() - set(without))[part::num_parts]:
        if damage := file_damage(folder, name, files[name], by_size):
            return damage
    return None


def list_checkpoints(root: str) -> list[str]:
    """The finished checkpoints in `root`, in order of writing. A run may have gone back to an earlier step.

    The order is that of the numbers in their manifests: a clock may be set back. One whose manifest cannot be read comes
    after those with a lower step, so that a resume names it.
    """
    places = {path: _place(path) for path in _folders(root)}
    found = sorted((path for path in places if places[path][0] >= 0), key=places.__getitem__)
    for path in sorted(places.keys() - found, key=step_of):
        lower = [number for number, other in enumerate(found, start=1) if step_of(other) < step_of(path)]
        found.insert(max(lower, default=0), path)
    return found


def _folders(root: str) -> list[str]:
    names = os.listdir(root) if os.path.isdir(root) else []
    return [os.path.join(root, name) for name in names if STEP.fullmatch(name)]


def step_of(folder: str) -> int:
    """The step of a checkpoint, from the name of its folder."""
    return int(folder.rpartition("_")[2])


def _place(folder: str) -> tuple[int, float, int]:
    """What orders checkpoints: number, time, step. Older ones have the number 0. It is -1 without an intact manifest."""
    try:
        content = _read_manifest(folder)
    except DamagedFile:
        return -1, 0.0, step_of(folder)
    return content.get("number", 0), content["written_at"], step_of(folder)


def checkpoints_to_load(root: str, wanted: str) -> list[str]:
    """The checkpoints in `root` that --load_checkpoint may take, the newest first, or the only one that it names.

    Raises UserError if it names no checkpoint. A folder in a run gets a hint to the newest checkpoint of that run.
    """
    if wanted == LATEST:
        return list_checkpoints(root)[::-1]
    flag, allowed = "--load_checkpoint", "a checkpoint, or no value: the latest"
    if not os.path.isdir(wanted):
        raise UserError(flag, f"{wanted} is not a folder", allowed)
    wanted = os.path.abspath(wanted)
    if not any(os.path.exists(os.path.join(wanted, name)) for name in (MANIFEST, "state.json")):
        places = [wanted, os.path.join(wanted, "checkpoints"), os.path.join(os.path.dirname(wanted), "checkpoints")]
        for place in places:
            if found := list_checkpoints(place):
                raise UserError(flag, f"{wanted} is no checkpoint", instead=f"Did you mean {found[-1]}?")
        if not STEP.fullmatch(os.path.basename(os.path.realpath(wanted))):
            raise UserError(flag, f"{wanted} is no checkpoint", allowed)
    return [wanted]


def remove_temporaries(root: str) -> None:
    """Remove unfinished files of a killed run from `root`. A step_N that `commit` set aside gets its name back."""
    for name in os.listdir(root) if os.path.isdir(root) else []:
        path = os.path.join(root, name)
        if name.endswith(".old.tmp") and not os.path.exists(path.removesuffix(".old.tmp")):
            os.replace(path, path.removesuffix(".old.tmp"))
        elif name.endswith(".tmp"):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


def linked_step(root: str, newest: int) -> Optional[int]:
    """The step of the checkpoint that `best` links to, or None without one up to step `newest`."""
    name = os.path.basename(os.path.realpath(os.path.join(root, BEST)))
    step = int(name.removeprefix("step_")) if STEP.fullmatch(name) else None
    return step if step is not None and step <= newest else None


def set_best(root: str, folder: str) -> None:
    """Make `root/best` point to a checkpoint, in one step."""
    link = os.path.join(root, BEST)
    if os.path.lexists(link + ".tmp"):
        os.remove(link + ".tmp")
    os.symlink(os.path.basename(folder), link + ".tmp")
    os.replace(link + ".tmp", link)


def folder_bytes(folder: str) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for name in files_below(folder))


def rotate(root: str, max_num: Optional[int], max_bytes: Optional[float], written: str = "") -> list[str]:
    """Remove the oldest checkpoints beyond a number or a size. Call it when a new one, `written`, is complete.

    That one, the newest and the best are never removed. Returns the removed folders.
    """
    best = os.path.realpath(os.path.join(root, BEST))
    kept = list_checkpoints(root)
    sizes = {path: folder_bytes(path) for path in kept} if max_bytes is not None else {}
    removed = []
    for path in _removable(list(kept), best, written):
        too_many = max_num is not None and len(kept) > max_num
        too_large = max_bytes is not None and sum(sizes[other] for other in kept) > max_bytes
        if not (too_many or too_large):
            break
        os.replace(path, path + ".tmp")  # a half-removed checkpoint must not look complete
        shutil.rmtree(path + ".tmp", ignore_errors=True)
        kept.remove(path)
        removed.append(path)
    return removed


def _removable(paths: list[str], best: str, written: str) -> list[str]:
    newest = max(paths, key=_place, default="")  # not a damaged one
    return [path for path in paths if path not in (newest, written) and os.path.realpath(path) != best]

"""The parts of `certificate.json`: chains over the steps, hashes of files, and the file with its own hash.

The chain of batch hashes is the same on every layout. A resumed run has the chain of an uninterrupted one. The
certificate is a seal. With a key it is signed too: see docs/certificates.md.
"""

import hashlib
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer.checkpoints import checkpoint_store as store
from trainer.comma_separated import names_in
from trainer.datasets.files.loading import local_paths
from trainer.errors import UserError
from trainer.limits import lines_of, read_text
from trainer.metrics import METRICS_FILE, ROLLOUTS_FILE, row_of
from trainer.reports import signature
from trainer.reports.run_rows import up_to

FILE = "certificate.json"
FORMAT = 1
# the chain of rows covers these; times and memory differ between machines
CHAINED = ("step", "epoch", "batch_hash", "tokens", "loss", "grad_norm", "lr")
OF_START = ("config", "mesh", "versions", "data", "total_steps")
DATA_FLAGS = ("dataset", "eval_dataset")
COMMANDS = ("train_sft", "train_kd", "train_dpo", "train_rm", "train_ppo")
PARTS = {
    "command": str, "arguments": dict, "mesh": dict, "versions": dict, "models": dict, "data": dict, "steps": dict,
    "files": dict, "saved_models": dict, "checkpoints": dict, "resumed_after_steps": list, "total_steps": int,
}  # fmt: skip
SEALS = ("blake2b", "signature")
DEEPEST, LARGEST = 32, 2**63  # of the values of a certificate: lists and objects in each other, and integers
RUN_FILES = (METRICS_FILE, "config.yaml", ROLLOUTS_FILE)


# --- the parts


def final_rows(folder: str) -> tuple[list[dict], list[dict]]:
    """(rows of starts and resumes, step rows in order) of a metrics.jsonl. Steps that a resume repeated count once.

    A start or resume row without facts gets the facts of the row before it. Raises UserError for a broken file.
    """
    path, starts, rows = os.path.join(folder, METRICS_FILE), [], {}
    try:
        lines = list(lines_of(path))
    except OSError as error:
        raise UserError(path, str(error.strerror), "the file as it was written") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = row_of(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path} line {number}", "is no row of a run", "the file as it was written") from None
        if row.get("event") in ("start", "resume"):
            starts.append({**(starts[-1] if starts else {}), "step": 0, **row})
            rows = up_to(starts[-1]["step"], rows)
        elif "event" not in row and "loss" in row:
            rows[row["step"]] = row
    if absent := [name for name in OF_START if name not in (starts[-1] if starts else {})]:
        raise UserError(path, f"has no start row with its {absent[0]}", "the file as it was written")
    return starts, [rows[step] for step in sorted(rows)]


def describe_steps(rows: list[dict]) -> dict:
    """The chains over all steps, and the curves."""
    return {
        "first": rows[0]["step"] if rows else 0,
        "last": rows[-1]["step"] if rows else 0,
        "batch_chain": chain(str(row["batch_hash"]) for row in rows),
        "row_chain": chain(json.dumps([row.get(key) for key in CHAINED]) for row in rows),
        "batch_hashes": [row["batch_hash"] for row in rows],
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
    }


def chain(texts) -> str:
    """h_i = blake2b(h_(i-1) + text_i), from an empty h_0. The last hash depends on all texts and their order."""
    link = b""
    for text in texts:
        link = hashlib.blake2b(link + text.encode(), digest_size=16).digest()
    return link.hex()


def hash_path(path: str) -> dict[str, dict]:
    """{name: {"size", "blake2b"}} of a file (its name is "") or of the files directly in a folder."""
    if not os.path.isdir(path):
        return {"": store.hash_file(path)}
    names = list_files(path)
    with ThreadPoolExecutor() as pool:  # hashing frees Python's lock
        return dict(zip(names, pool.map(lambda name: store.hash_file(os.path.join(path, name)), names), strict=True))


def list_files(folder: str) -> list[str]:
    """The files directly in a folder that a certificate covers."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith("."))


def data_paths(arguments: dict) -> dict[str, str]:
    """{name: path} of every local file and folder of --dataset and --eval_dataset. A pattern names each of its files."""
    found = {}
    for name in (name for flag in DATA_FLAGS for name in names_in(arguments.get(flag))):
        paths = local_paths(name)[0]
        found |= {name: paths[0]} if paths == [os.path.expanduser(name)] else {path: path for path in paths}
    return found


def hash_data(arguments: dict) -> dict[str, dict]:
    if arguments.get("streaming"):  # hashing would read the whole set once more; batch hashes say what was read
        return {}
    return {name: hash_path(path) for name, path in data_paths(arguments).items()}


def hash_run_files(folder: str) -> dict[str, dict]:
    there = [name for name in RUN_FILES if os.path.exists(os.path.join(folder, name))]
    return {name: hash_path(os.path.join(folder, name))[""] for name in there}


def hash_checkpoints(folder: str) -> dict[str, str]:
    """{step_N: hash of its manifest}. A manifest holds the hash of every other file of its checkpoint."""
    found = store.list_checkpoints(os.path.join(folder, "checkpoints"))
    manifests = {os.path.basename(path): os.path.join(path, store.MANIFEST) for path in found}
    return {name: store.hash_file(path)["blake2b"] for name, path in manifests.items() if os.path.exists(path)}


def hardware(device: str) -> dict:
    """The machine of rank 0, and the number of ranks."""
    cuda = device.startswith("cuda")
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu_cores": os.cpu_count(),
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
    }


def shown_path(path: str, folder: str) -> str:
    """A path in the run folder is written relative to it, so that the folder can move."""
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(folder))
    return os.path.abspath(path) if relative.startswith("..") else relative


def has_rollouts(content: dict) -> bool:
    """Whether the run trained rollouts: `train_ppo`, and `train_dpo --online`."""
    return "rollout_batch_size" in content["arguments"]


# --- the file


def own_hash(content: dict) -> str:
    """The hash of all parts but itself and the signature, which is over this hash."""
    text = json.dumps({key: value for key, value in content.items() if key not in SEALS}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def write(folder: str, content: dict, sign_key: str | None = None) -> None:
    """Write the certificate with its own hash, in one step. `sign_key` is a file: without it, no signature is written."""
    path, found = os.path.join(folder, FILE), own_hash(content)
    seals = {"blake2b": found} | ({"signature": signature.sign(found, sign_key)} if sign_key else {})
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump({**{name: part for name, part in content.items() if name not in SEALS}, **seals}, file, indent=1)
    os.replace(path + ".tmp", path)


def read(folder: str) -> dict:
    """The content of the certificate, not checked. Raises UserError if there is none that this version can read."""
    path = os.path.join(folder, FILE)
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        found = f"{folder} has no {FILE} ({error.strerror})"
        raise UserError("RUN", found, "a finished run with --certificate") from None
    except (ValueError, RecursionError):
        raise UserError(path, "is not JSON: it is cut off or edited", "the file as it was written") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(path, "has no format that this version reads", f"format {FORMAT}")
    for name, kind in PARTS.items():
        if not isinstance(content.get(name), kind) or (name == "command" and content[name] not in COMMANDS):
            raise UserError(path, f"has no part {name} as a run writes it", "the file as it was written")
    _check_values(path, content)
    return content


def _check_values(path: str, content: dict) -> None:
    """Raise UserError for an integer that no run writes, and for lists and objects too deep in each other."""
    level, depth = [content], 0
    while level:
        for one in level:
            if isinstance(one, int) and abs(one) > LARGEST:
                raise UserError(path, f"has a number of {one.bit_length()} bits", "numbers as a run writes them")
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
        if depth > DEEPEST:
            raise UserError(
                path, f"has more than {DEEPEST} lists or objects in each other", "the file as it was written"
            )

"""Gather the identity of a run: its flags, and the contents of what they name. See `checkpoints/run_identity.py`."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch
from safetensors import safe_open

from trainer.checkpoints.run_identity import Identity, check_allowed, sealed
from trainer.checkpoints.user_modules import module_files
from trainer.comma_separated import names_in
from trainer.datasets.batches.global_batches import column_of, hash_digests
from trainer.datasets.conversations.tokens import tokenizer_state
from trainer.datasets.conversations.turn_ends import stop_ids
from trainer.datasets.files.stream_rows import contents_of_files
from trainer.flags.groups import flat, public_flags
from trainer.flags.rule import knowledge
from trainer.flags.rules import COMMANDS
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import is_adapter, read_adapter
from trainer.model_folders.model_folder import read_config
from trainer.models.cpu_matmul import chosen
from trainer.models.model_loading import resolve_adapted_model
from trainer.planning.versions import version_of
from trainer.runs.outputs import KERNELS, versions

# of a config: they name it and its file, and change no number of the model
WITHOUT_EFFECT = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}  # fmt: skip
HASHED_WHOLE = 2 << 30  # bytes of weights; of larger models, three parts of each tensor are hashed
PART = 1 << 14  # elements of a part
CODE = ("reward_func", "judge_rubric", "env")  # flags that name files of the user
PROCESSOR = ("preprocessor_config.json", "processor_config.json")  # means, deviations and sizes of images
TARGETS = ("num_loss_tokens", "label", "margin", "teacher")  # columns that the digest of a sample leaves out


def identity_of(run, flags) -> Identity:
    """The identity of a run whose data is loaded, on every rank. `flags` are the groups of its command.

    Only rank 0 gathers contents, since only rank 0 writes and compares them. Raises UserError for a wrong --allow_change.
    """
    defaults = flat(type(flags)())
    allowed = tuple(check_allowed(flags.checkpoint.allow_change or (), type(flags)))
    record = {"command": run.method.command, "flags": public_flags(flags)}
    if run.setup.strategy.is_rank_0():
        packages = {name: version_of(name) for name in KERNELS}
        kernels = {"attention": run.setup.attention, "device": device_name(run.setup.strategy.device)}
        kernels |= {"cpu_matmul": chosen()} if kernels["device"] == "cpu" else {}
        record |= {"content": contents(run, flags), "versions": packages | versions(), "kernels": kernels}
    return Identity(sealed(record), defaults, allowed)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --- contents


def contents(run, flags) -> dict[str, dict]:
    """{flag: facts} of the models, the code and the targets of a run."""
    known, setup = knowledge(flags, COMMANDS.values()), run.setup
    found: dict[str, dict] = {"pretrain": {"config": config_of(setup.folder, setup.trust_remote_code)}}
    hash_of = functools.cache(weights_hash)  # several models may be of one folder
    for flag, name in frozen_models(run).items():
        if flag == "ref_model":
            path, adapter = run.references[0]
        else:
            path, adapter = resolve_adapted_model(name, f"--{flag.split()[0]}") if name else (setup.folder, None)
        found[flag] = {"config": config_of(path, setup.trust_remote_code), "weights": hash_of(path)}
        if is_adapter(adapter):
            found[flag]["adapter"] = read_adapter(adapter, f"--{flag}").config | {"weights": hash_of(adapter)}
    if setup.rolls_out:
        state = json.dumps(tokenizer_state(setup.tokenizer) | {"transformers": None}, sort_keys=True)
        found["pretrain"]["tokenizer"] = hashlib.blake2b(state.encode(), digest_size=8).hexdigest()
        found["pretrain"]["stop_ids"] = sorted(stop_ids(setup.tokenizer, setup.folder))
    found["pretrain"]["image_processor"] = files_hash(setup.folder, PROCESSOR.__contains__)
    if setup.trust_remote_code:
        found["pretrain"]["remote_code"] = files_hash(setup.folder, lambda name: name.endswith(".py"))
    if rollouts := vars(known).get("rollouts_from"):
        found["rollouts_from"] = {"rows": _hash_whole(rollouts)}
    for flag in (flag for flag in CODE if vars(known)[flag]):
        found[flag] = {"code": code_hash(vars(known)[flag]), "modules": modules_of(flag, vars(known)[flag])}
    found["dataset"] = stream_facts(run, known) if known.streaming else {"targets": targets_hash(run.samples)}
    if run.eval_samples:
        found["eval_dataset"] = {"rows": rows_hash(run.eval_samples)}
    return found


def stream_facts(run, known) -> dict[str, Any]:
    """Facts of streamed files. Says so if a resume cannot compare all of their bytes."""
    facts = contents_of_files(known.dataset, known.dataset_split)
    if count := facts.pop("not_compared"):
        found = f"of {counted(count, 'file')}, a resume compares the name, the size, and parts where they are here"
        run.setup.strategy.print(f"--streaming: {found}. It cannot know another order of rows in between")
    return facts


def frozen_models(run) -> dict[str, Optional[str]]:
    """{flag: name} of the models whose weights stay as they are. None names the model of --pretrain.

    The reference has the flag ref_model.
    """
    base = {"pretrain": None} if run.args.lora.lora_rank else {}
    return base | run.method.frozen_models(run)


def config_of(folder: str, trust_remote_code: bool) -> dict[str, Any]:
    """The config of a model with all its defaults, without what changes no number."""
    values = read_config(folder, trust_remote_code).to_dict()
    return json.loads(json.dumps(_without(values), default=str))


def _without(values: dict) -> dict:
    return {k: _without(v) if isinstance(v, dict) else v for k, v in values.items() if k not in WITHOUT_EFFECT}


def weights_hash(folder: str) -> str:
    """A hash of the weights in a model folder. Of large ones, it takes the ends and the middle of each tensor."""
    names = sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", ".bin")))
    paths = [os.path.join(folder, name) for name in names]
    is_large = sum(map(os.path.getsize, paths)) > HASHED_WHOLE
    with ThreadPoolExecutor() as pool:  # hashing frees Python's lock
        hashes = list(pool.map(_hash_parts if is_large else _hash_whole, paths))
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def _hash_whole(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _hash_parts(path: str) -> str:
    digest = hashlib.blake2b(str(os.path.getsize(path)).encode(), digest_size=16)
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def _parts(path: str) -> Iterator[bytes]:
    """The ends and the middle of each tensor, or of the file if it is no safetensors file."""
    if not path.endswith(".safetensors"):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            for start in (0, size // 2, max(0, size - PART)):
                file.seek(start)
                yield file.read(PART)
        return
    with safe_open(path, framework="pt") as weights:
        for name in sorted(weights.keys()):
            part = weights.get_slice(name)
            rows = part.get_shape()[0] if part.get_shape() else 0
            yield f"{name} {part.get_shape()} {part.get_dtype()}".encode()
            for row in {0, rows // 2, rows - 1} if rows else ():
                yield part[row : row + 1].contiguous().view(torch.uint8).flatten()[: 4 * PART].numpy().tobytes()


def files_hash(folder: str, is_read: Callable[[str], bool]) -> Optional[str]:
    """A hash of the files of a folder with these names, or None without any."""
    names = sorted(filter(is_read, os.listdir(folder)))
    hashes = [f"{name} {_hash_whole(os.path.join(folder, name))}" for name in names]
    return hashlib.blake2b("\n".join(hashes).encode(), digest_size=8).hexdigest() if names else None


def code_hash(names: str) -> str:
    """A hash of the Python files in the value of a flag, and of the other names in it."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names_in(names):
        key, path = _key_and_code(name)
        if os.path.isfile(path):
            digest.update(f"{key}=".encode() if key else b"")
        digest.update(open(path, "rb").read() if os.path.isfile(path) else name.encode())  # noqa: SIM115
    return digest.hexdigest()


def modules_of(flag: str, names: str) -> Optional[dict[str, str]]:
    """{path within its folder: hash} of the further Python files that the code of a flag needs: see user_modules.py.

    A module that is named without its file is one of them. Another one of the same path, in the folder of a later name,
    has the number of that name behind it. None without any.
    """
    found = {}
    for number, name in enumerate(names_in(names), start=1):
        _, path = _key_and_code(name)
        root, files = module_files(path, is_module=flag == "env")
        for file in files[os.path.isfile(path) :]:
            own, digest = os.path.relpath(file, root), _hash_whole(file)
            found[own if found.get(own, digest) == digest else f"{own} of code {number}"] = digest
    return found or None


def _key_and_code(name: str) -> tuple[str, str]:
    """KEY and FILE.py of KEY=FILE.py:NAME, which --env_key wants; "" and a file or module of other names."""
    path = name.split(":")[0]
    key, mark, file = path.partition("=")
    return (key, file) if mark and not os.path.isfile(path) else ("", path)


def rows_hash(samples) -> str:
    """A hash of the tokens of samples, and of what `targets_hash` takes."""
    return f"{hash_digests(column_of(samples, 'digest'))} {targets_hash(samples)}"


def targets_hash(samples) -> str:
    """A hash of what the samples are trained for, besides their tokens: labels, margins, numbers of loss tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for name in (name for name in TARGETS if name in samples.column_names):
        if name == "num_loss_tokens":
            digest.update(column_of(samples, name).tobytes())
            continue
        column = samples.select_columns([name]) if hasattr(samples, "select_columns") else {name: samples[name]}
        digest.update(repr(list(column[name])).encode())
    return digest.hexdigest()

"""Say in one line what is wrong with a model folder, its tokenizer or its model. Used only after a reader has failed."""

import json
import os
import struct
import zipfile
from importlib.metadata import version

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

from trainer.errors import UserError, one_line
from trainer.limits import is_inside
from trainer.model_folders.model_folder import check_weights

LFS_POINTER = b"version https://git-lfs"
TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "vocab", "added_tokens", "chat_template")
DOWNLOAD = "complete files: download the folder again"


def unreadable(folder: str, flag: str, error: Exception) -> UserError:
    """What is wrong with the files of `folder`, which `flag` names. `error` is what the reader raised."""
    names = sorted(os.listdir(folder))
    for name in names:
        path = os.path.join(folder, name)
        fault = None
        if name.endswith((".safetensors", ".bin", ".json", ".model")):
            fault = _fault_of_any(path)
        if not fault and name.endswith(".safetensors"):
            fault = _fault_of_safetensors(path)
        if not fault and name.startswith("pytorch_model") and name.endswith(".bin"):
            fault = _fault_of_bin(path)
        if fault:
            return UserError(flag, f"{path} {fault}", DOWNLOAD)
        if os.path.isfile(path) and name.endswith(".json") and (fault := _fault_of_json(path)):
            return UserError(flag, f"{path} {fault}", "the file as it was published")
    for name in names:
        if name.endswith(".index.json") and (found := _fault_of_index(folder, name)):
            return UserError(flag, f"{folder}: {found}", DOWNLOAD)
    return _fault_of_config(folder, flag) or UserError(flag, f"{folder} cannot be read: {one_line(error)}")


def _fault_of_any(path: str) -> str | None:
    if not os.path.isfile(path):
        return "is no regular file, or a broken link"
    if not os.path.getsize(path):
        return "is empty"
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "is a pointer of git-lfs, not the file itself (git lfs pull)"
    return None


def _fault_of_safetensors(path: str) -> str | None:
    """The file is 8 bytes with the length of the header, the header in JSON, and the data."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return f"is cut off in its header, or no safetensors file ({size} bytes)"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "has a broken header, or is no safetensors file"
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        return f"is cut off: {size} of {wanted} bytes"
    return None if size == wanted else f"has {size} bytes, and its header says {wanted}"


def _fault_of_bin(path: str) -> str | None:
    with open(path, "rb") as file:
        is_old = file.read(2) == b"\x80\x02"  # a pickle, as torch wrote before 1.6
    return None if is_old or zipfile.is_zipfile(path) else "is cut off, or no file of torch.save"


def _fault_of_json(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except RecursionError:
        return "is nested too deep"
    except ValueError as error:
        return f"is broken JSON ({error})"
    return None if isinstance(content, dict) else "holds no JSON object"


def _fault_of_index(folder: str, name: str) -> str | None:
    with open(os.path.join(folder, name), encoding="utf-8-sig") as file:
        weight_map = json.load(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return f"{name} holds no weight_map of names and files"
    files = sorted(set(weight_map.values()))
    if outside := next((file for file in files if not is_inside(file)), None):
        return f"{name} names a file outside of its folder: {outside}"
    missing = [file for file in files if not os.path.exists(os.path.join(folder, file))]
    if missing:
        return f"{len(missing)} of the {len(files)} files of {name} are missing, such as {missing[0]}"
    for file in files if name.startswith("model.safetensors") else []:
        with safe_open(os.path.join(folder, file), framework="pt") as weights:
            held = set(weights.keys())
        for tensor, place in weight_map.items():
            if place == file and tensor not in held:
                return f"{name} names {tensor}, which {file} does not hold"
    return None


def _fault_of_config(folder: str, flag: str) -> UserError | None:
    path, here = os.path.join(folder, "config.json"), f"transformers {version('transformers')}"
    with open(path, encoding="utf-8-sig") as file:
        config = json.load(file)
    kind = config.get("model_type")
    if "auto_map" not in config and not isinstance(kind, str):
        return UserError(flag, f"{path} names no model_type", "the config.json of a Hugging Face model")
    if "auto_map" not in config and kind not in CONFIG_MAPPING:
        written = config.get("transformers_version")
        found = f"{here} does not know the model_type {kind!r} of {folder}"
        return UserError(
            flag, found, f"transformers {written} or newer wrote it" if written else "a newer transformers"
        )
    if kind == "cpmant":
        return UserError(flag, f"{folder} is a {kind}, whose mask wants padding on the left", "another architecture")
    readers = [(path, AutoConfig)] if "auto_map" not in config else []
    for name, reader in [*readers, (os.path.join(folder, "generation_config.json"), GenerationConfig)]:
        try:
            if os.path.exists(name):
                reader.from_pretrained(folder)
        except Exception as error:  # of many types: each class checks its values in its own way
            return UserError(flag, f"{name} is refused by {here}: {_reason(error)}")
    return None


def _reason(error: BaseException) -> str:
    """All lines as one. Validation errors of the hub's dataclasses have a heading first, and then the cause."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def load_fault(folder: str, auto_class, trust_remote_code: bool, flag: str, error: Exception) -> UserError:
    """Why `auto_class` made no model of `folder`, whose files can be read.

    `flag` names the folder. `error` is what transformers raised.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    is_ours = type(config).__module__.startswith("transformers.models.")  # else its code came with the model
    if is_ours and type(config) not in auto_class._model_mapping:
        task = auto_class.__name__.removeprefix("AutoModelFor")
        return UserError(flag, f"{folder}: transformers has no {task} for {config.model_type}", "another model")
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as fault:  # of many types: each model computes its sizes in its own way
        return UserError(flag, f"{folder}/config.json describes no model that can be built: {_reason(fault)}")
    try:
        check_weights(model, folder, flag)
    except UserError as fault:
        return fault
    return UserError(flag, f"{folder} cannot be loaded: {type(error).__name__}: {_reason(error)}")


def tokenizer_fault(folder: str, error: Exception | None = None) -> UserError:
    """Why the tokenizer of `folder` cannot be loaded. Without an `error`, its files hold no vocabulary."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(TOKENIZER_FILES):
            fault = _fault_of_any(path) or (_fault_of_json(path) if name.endswith(".json") else None)
            if fault:
                return UserError(path, fault, "the file as it was published")
    if error is None or not any(
        name.startswith(TOKENIZER_FILES) or name.endswith(".model") for name in os.listdir(folder)
    ):
        return UserError(folder, "contains no tokenizer", "a model folder with tokenizer.json, as it was published")
    return UserError(folder, f"contains no tokenizer that transformers reads: {one_line(error)}")


def check_tokens(tokenizer, vocab_size: int, folder: str, flag: str) -> None:
    """Raise UserError if the tokenizer makes a token that the model has no embedding for.

    Special tokens that no text contains, such as the token of an image, may be beyond. Some published models have them.
    """
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        added = tokenizer.added_tokens_decoder.get(number)
        if number >= vocab_size and (number in used or added is None or not added.special):
            found = f"{folder}: token {number} ({token!r}) of the tokenizer is beyond the {vocab_size} of the model"
            raise UserError(flag, found, "the tokenizer of the model, or a model with resized embeddings")
